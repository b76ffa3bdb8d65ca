// A stand-in for libamdhip64 and libhiprtc, one library under both names: hands compilation and launches to callbacks, so that
// the real hip-python bindings run end to end on a machine without ROCm. Signatures are those of the HIP headers.
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <string>

namespace {
struct Program { std::string source, name, log, code; };
struct Module { const char* image; };
struct Function { Module* module; std::string name; };

// (source, name, options separated by newlines, where to put log and code) -> 0 or an hiprtcResult.
using Compile = int (*)(const char*, const char*, const char*, void*);
// (image, kernel, grid and block, stream, arguments, their bytes) -> 0 or a hipError_t.
using Launch = int (*)(const char*, const char*, const unsigned*, void*, const void*, size_t);
Compile g_compile = nullptr;
Launch g_launch = nullptr;
int g_devices = 1;

constexpr int kNotFound = 500, kInvalidValue = 1;
}  // namespace

extern "C" {
void double_set(Compile compile, Launch launch, int devices) { g_compile = compile, g_launch = launch, g_devices = devices; }
void double_result(void* program, const char* log, const char* code, size_t size) {
  static_cast<Program*>(program)->log = log;
  static_cast<Program*>(program)->code.assign(code, size);
}

int hiprtcVersion(int* major, int* minor) { *major = 9, *minor = 0; return 0; }
int hiprtcCreateProgram(Program** program, const char* source, const char* name, int, const char**, const char**) {
  *program = new Program{source, name, "", ""};
  return 0;
}
int hiprtcCompileProgram(Program* program, int count, const char** options) {
  std::string joined;
  for (int i = 0; i < count; ++i) joined += std::string(options[i]) + "\n";
  return g_compile(program->source.c_str(), program->name.c_str(), joined.c_str(), program);
}
int hiprtcGetProgramLogSize(Program* program, size_t* size) { *size = program->log.size() + 1; return 0; }
int hiprtcGetProgramLog(Program* program, char* log) { std::memcpy(log, program->log.c_str(), program->log.size() + 1); return 0; }
int hiprtcGetCodeSize(Program* program, size_t* size) { *size = program->code.size(); return 0; }
int hiprtcGetCode(Program* program, char* code) { std::memcpy(code, program->code.data(), program->code.size()); return 0; }
int hiprtcDestroyProgram(Program** program) { delete *program; *program = nullptr; return 0; }
const char* hiprtcGetErrorString(int) { return "error of the double"; }

int hipGetDeviceCount(int* count) { *count = g_devices; return g_devices ? 0 : 100; }
int hipRuntimeGetVersion(int* version) { *version = 60443483; return 0; }
int hipModuleLoadData(Module** module, const void* image) {
  if (std::memcmp(image, "\x7f" "ELF", 4) != 0) return 209;  // hipErrorNoBinaryForGpu
  *module = new Module{static_cast<const char*>(image)};
  return 0;
}
int hipModuleGetFunction(Function** function, Module* module, const char* name) {
  if (std::strcmp(name, "missing") == 0) return kNotFound;
  *function = new Function{module, name};
  return 0;
}
int hipModuleLaunchKernel(Function* f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared,
                          void* stream, void** params, void** extra) {
  // extra: HIP_LAUNCH_PARAM_BUFFER_POINTER (1), pointer, HIP_LAUNCH_PARAM_BUFFER_SIZE (2), size*, HIP_LAUNCH_PARAM_END (3)
  if (params != nullptr || extra == nullptr || extra[0] != reinterpret_cast<void*>(1) || extra[2] != reinterpret_cast<void*>(2) ||
      extra[4] != reinterpret_cast<void*>(3) || shared != 0)
    return kInvalidValue;
  const unsigned shape[6] = {gx, gy, gz, bx, by, bz};
  return g_launch(f->module->image, f->name.c_str(), shape, stream, extra[1], *static_cast<size_t*>(extra[3]));
}
}
