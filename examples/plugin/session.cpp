// Opens a converted model with the operator library as an execution provider:
// the names of its inputs, one a line. See README.md beside this file.
#include <onnxruntime_c_api.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>

static const OrtApi &api = *OrtGetApiBase()->GetApi(24);

static void check(OrtStatus *status) {
  if (status == nullptr)
    return;
  std::fprintf(stderr, "%s\n", api.GetErrorMessage(status));
  std::exit(1);
}

int main(int count, char **arguments) {
  if (count != 3)
    return std::fprintf(stderr, "usage: session LIBRARY MODEL\n"), 2;
  OrtEnv *env = nullptr;
  check(api.CreateEnv(ORT_LOGGING_LEVEL_WARNING, "example", &env));
  // Once in a process:
  check(api.RegisterExecutionProviderLibrary(env, "tq_onnx", arguments[1]));

  // For each session:
  OrtSessionOptions *options = nullptr;
  check(api.CreateSessionOptions(&options));
  const OrtEpDevice *const *devices = nullptr;
  size_t num_devices = 0;
  check(api.GetEpDevices(env, &devices, &num_devices));
  for (size_t i = 0; i < num_devices; ++i) {
    if (std::strcmp(api.EpDevice_EpName(devices[i]),
                    "TurboQuantExecutionProvider") != 0)
      continue;
    check(api.SessionOptionsAppendExecutionProvider_V2(
        options, env, &devices[i], 1, nullptr, nullptr, 0));
  }
  OrtSession *session = nullptr;
  check(api.CreateSession(env, arguments[2], options, &session));

  OrtAllocator *allocator = nullptr;
  check(api.GetAllocatorWithDefaultOptions(&allocator));
  size_t num_inputs = 0;
  check(api.SessionGetInputCount(session, &num_inputs));
  for (size_t i = 0; i < num_inputs; ++i) {
    char *name = nullptr;
    check(api.SessionGetInputName(session, i, allocator, &name));
    std::puts(name);
    check(api.AllocatorFree(allocator, name));
  }
  api.ReleaseSession(session);
  api.ReleaseSessionOptions(options);
  check(api.UnregisterExecutionProviderLibrary(env, "tq_onnx"));
  api.ReleaseEnv(env);
}
