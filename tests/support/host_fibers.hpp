// The threads of a block (AMD: the work-items of a workgroup) as fibers of one host thread, for kernels that are built as
// host C++ by host_execution.py.
//
// Made to find faults: warps (waves) take turns in a random order, one of them may be as slow as it can be, global memory
// outside the given tensors is a fault, and a block whose threads do not all come to the same place, or that goes on for
// ever, ends with a report of who waits where.
//
// The text after this one defines call_kernel, start_block and start_thread; HOST_WARP is the lanes of a warp.
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>

#include <string>
#include <vector>

namespace host {

constexpr int kWarp = HOST_WARP, kMostThreads = 1024, kStackBytes = 128 << 10;
constexpr int kMostRounds = 1 << 16;  // of turns; the longest block of the tests takes some two thousand
enum Result { kDone = 0, kDeadlock = 1, kFault = 2, kEndless = 3 };

struct Index { int x, y, z; };
struct Range { const unsigned char *begin, *end; };
// What a thread waits for, and where if that matters.
struct Site {
  const char* what;
  const char* file;
  int line;
  bool operator==(const Site& other) const { return what == other.what && line == other.line; }
};
struct Fiber {
  ucontext_t context;
  std::vector<unsigned char> stack;
  bool ended;
  Site site;
};
struct Slot { alignas(8) unsigned char bytes[64]; };
struct Meeting {
  int arrived;
  unsigned generation;
  Site site;  // of the first to come
};
struct Warp : Meeting { Slot slots[2][kWarp]; };

Fiber fibers[kMostThreads];
Warp warps[kMostThreads / kWarp];
Meeting block;
ucontext_t scheduler;
int current, threads;
Index grid, block_index, thread_index;
unsigned long long progress, random_state;
int slow;  // the warp that moves only when nothing else can; past the last one: the copy engine; negative: none
bool fault, still;  // still: the last round of turns moved nothing
std::vector<Range> ranges;
std::string report;

void call_kernel(const void* params);  // made for the kernel
void start_block();
void start_thread(int thread);

inline unsigned random(unsigned below) {
  random_state = random_state * 6364136223846793005ull + 1442695040888963407ull;
  return unsigned(random_state >> 33) % below;
}

inline bool is_slow() { return current / kWarp == slow; }

// Lets the others run, the lanes of this warp first.
inline void yield() { swapcontext(&fibers[current].context, &scheduler); }

// Waits until `count` fibers have come to this site; who comes from another one is not counted, and all wait forever.
inline void meet(Meeting& meeting, int count, Site site) {
  const unsigned generation = meeting.generation;
  fibers[current].site = site;
  if (meeting.arrived == 0) meeting.site = site;
  if (meeting.site == site && ++meeting.arrived == count) {
    meeting.arrived = 0;
    meeting.generation++;
    progress++;
  }
  while (meeting.generation == generation) yield();
}

// What every lane of the warp gave; stays until the next but one call.
template <typename T> const Slot* exchange(const T& mine, const char* what = "exchange") {
  Warp& warp = warps[current / kWarp];
  Slot* slots = warp.slots[warp.generation & 1];
  static_assert(sizeof(T) <= sizeof(Slot), "a slot holds it");
  memcpy(slots[current % kWarp].bytes, &mine, sizeof(T));
  meet(warp, kWarp, {what, "", 0});
  return slots;
}
template <typename T> T value(const Slot& slot) {
  T x;
  memcpy(&x, slot.bytes, sizeof(T));
  return x;
}

inline bool readable(const void* from, int bytes) {
  const unsigned char* p = static_cast<const unsigned char*>(from);
  for (const Range& range : ranges)
    if (p >= range.begin && p + bytes <= range.end) return true;
  fault = true;
  return false;
}

inline const void* kernel_params;
inline void enter() {
  call_kernel(kernel_params);
  fibers[current].ended = true;
  progress++;
}

// Of a block that stands still: the threads that wait, counted by site.
inline std::string waiting() {
  std::vector<std::pair<Site, int>> sites;
  int ended = 0;
  for (int t = 0; t < threads; t++) {
    if (fibers[t].ended) {
      ended++;
      continue;
    }
    size_t i = 0;
    while (i < sites.size() && !(sites[i].first == fibers[t].site)) i++;
    if (i == sites.size()) sites.push_back({fibers[t].site, 0});
    sites[i].second++;
  }
  std::string text;
  for (const auto& [site, count] : sites) {
    text += std::to_string(count) + " at " + site.what;
    if (site.line) text += std::string(" (") + site.file + ":" + std::to_string(site.line) + ")";
    text += ", ";
  }
  return text + std::to_string(ended) + " have left";
}

inline Result run_block(const void* params) {
  kernel_params = params;
  block = {};
  still = false;
  start_block();
  for (int t = 0; t < threads; t++) {
    Fiber& fiber = fibers[t];
    fiber.ended = false;
    fiber.stack.resize(kStackBytes);
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.data();
    fiber.context.uc_stack.ss_size = kStackBytes;
    fiber.context.uc_link = &scheduler;
    makecontext(&fiber.context, enter, 0);
    if (t % kWarp == 0) static_cast<Meeting&>(warps[t / kWarp]) = {};
    start_thread(t);
  }
  int rounds = 0;
  for (int alive = threads; alive > 0;) {
    if (++rounds > kMostRounds) {
      report = waiting();
      return kEndless;
    }
    const unsigned long long before = progress;
    const int count = threads / kWarp, first = random(count);
    alive = 0;
    for (int i = 0; i < count; i++) {
      const int warp = (first + i) % count;
      const int turns = warp == slow ? still : 1 + random(3);  // a warp may run ahead of the others
      for (int lane = 0; lane < kWarp; lane++) alive += !fibers[warp * kWarp + lane].ended;
      for (int turn = 0; turn < turns; turn++)
        for (int lane = 0; lane < kWarp; lane++) {
          current = warp * kWarp + lane;
          thread_index.x = current;
          if (!fibers[current].ended) swapcontext(&scheduler, &fibers[current].context);
        }
    }
    if (fault) return kFault;
    if (alive > 0 && progress == before && (still || slow < 0)) {
      report = waiting();
      return kDeadlock;
    }
    still = progress == before;
  }
  return kDone;
}

}  // namespace host

extern "C" const char* host_report() { return host::report.c_str(); }

extern "C" int host_run(const void* params, const host::Index* grid, int threads, unsigned seed, int slow,
                        const host::Range* ranges, int count) {
  host::threads = threads;
  host::random_state = seed;
  host::slow = slow;
  host::fault = false;
  host::report.clear();
  host::ranges.assign(ranges, ranges + count);
  host::grid = *grid;
  host::Index& block = host::block_index;
  for (block.z = 0; block.z < grid->z; block.z++)
    for (block.y = 0; block.y < grid->y; block.y++)
      for (block.x = 0; block.x < grid->x; block.x++)
        if (const int result = host::run_block(params)) return result;
  return host::kDone;
}
