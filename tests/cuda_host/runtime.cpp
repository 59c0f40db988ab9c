// Scheduler of the host shim: runs one block after another, each CUDA thread as a fiber.
//
// A launch stops at the first error: an address outside its buffers (guard pages), a trap of the sanitizer (misaligned
// access, array index), threads that wait for one another for ever, lanes that do not agree on where they meet.
#include "cuda_host.hpp"

#include <setjmp.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <utility>
#include <vector>

#if !defined(__x86_64__)
#include <ucontext.h>
#endif

namespace cuda_host {

Thread* current = nullptr;

namespace {

constexpr int kMaxThreads = 1024;
constexpr size_t kStackBytes = 64 * 1024;
constexpr size_t kPage = 4096;
constexpr size_t kMaxDynamicShared = 256 * 1024;

enum State { kReady, kAtBarrier, kAtWarp, kDone };

struct Fiber {
  Thread thread;  // first: `current` points at it
  State state;
  int index;
#if defined(__x86_64__)
  void* stack_pointer;
#else
  ucontext_t context;
#endif
  Kind kind;
  unsigned mask;
  unsigned long long value, result;
  int source;
};

struct Launch {
  const Kernel* kernel;
  void** arguments;
  int num_threads, num_done, num_at_barrier, barrier_count, last_barrier_count;
  unsigned seed;
  unsigned long long random;
  unsigned short poison;
  char* error;
  size_t error_size;
};

Fiber fibers[kMaxThreads];
Launch launch;
char* stacks = nullptr;
char* dynamic_area = nullptr;  // kMaxDynamicShared bytes that end at a guard page
size_t dynamic_bytes = 0;
std::vector<int> ready, running;
sigjmp_buf escape;
volatile bool in_launch = false;

#if defined(__x86_64__)
void* scheduler_stack_pointer;
extern "C" void cuda_host_switch(void** save, void* load);
asm(R"(
.text
.globl cuda_host_switch
.type cuda_host_switch, @function
cuda_host_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size cuda_host_switch, .-cuda_host_switch
)");
#else
ucontext_t scheduler_context;
#endif

Fiber& self() { return *reinterpret_cast<Fiber*>(current); }

unsigned draw(unsigned bound) {
  launch.random ^= launch.random << 13;
  launch.random ^= launch.random >> 7;
  launch.random ^= launch.random << 17;
  return static_cast<unsigned>((launch.random >> 20) % bound);
}

template <typename T>
void shuffle_order(std::vector<T>& items) {
  for (size_t i = items.size(); i > 1; --i) std::swap(items[i - 1], items[draw(static_cast<unsigned>(i))]);
}

void to_scheduler() {
  Fiber& fiber = self();
#if defined(__x86_64__)
  cuda_host_switch(&fiber.stack_pointer, scheduler_stack_pointer);
#else
  swapcontext(&fiber.context, &scheduler_context);
#endif
}

void make_ready(Fiber& fiber) {
  fiber.state = kReady;
  ready.push_back(fiber.index);
}

void release_barrier() {
  launch.last_barrier_count = launch.barrier_count;
  launch.barrier_count = launch.num_at_barrier = 0;
  for (int i = 0; i < launch.num_threads; ++i) {
    if (fibers[i].state == kAtBarrier) make_ready(fibers[i]);
  }
}

void body() {
  launch.kernel->invoke(launch.arguments);
  Fiber& fiber = self();
  fiber.state = kDone;
  ++launch.num_done;
  const int first = fiber.index & ~31;
  for (int i = first; i < first + 32 && i < launch.num_threads; ++i) {
    if (fibers[i].state == kAtWarp && (fibers[i].mask >> (fiber.index & 31) & 1)) {
      fail("a lane ended while others of its warp wait for it in a warp intrinsic");
    }
  }
  if (launch.num_at_barrier > 0) fail("a thread ended while others wait at __syncthreads (divergent barrier)");
  to_scheduler();
  abort();
}

void start(Fiber& fiber) {
  char* top = stacks + (fiber.index + 1) * kStackBytes;
#if defined(__x86_64__)
  auto** slot = reinterpret_cast<void**>(top);
  *--slot = nullptr;                         // return address of body, which never returns; keeps rsp = 8 mod 16
  *--slot = reinterpret_cast<void*>(&body);  // return address of the switch
  for (int i = 0; i < 6; ++i) *--slot = nullptr;
  fiber.stack_pointer = slot;
#else
  getcontext(&fiber.context);
  fiber.context.uc_stack.ss_sp = top - kStackBytes;
  fiber.context.uc_stack.ss_size = kStackBytes;
  fiber.context.uc_link = nullptr;
  makecontext(&fiber.context, body, 0);
#endif
  make_ready(fiber);
}

void resume(Fiber& fiber) {
  current = &fiber.thread;
#if defined(__x86_64__)
  cuda_host_switch(&scheduler_stack_pointer, fiber.stack_pointer);
#else
  swapcontext(&scheduler_context, &fiber.context);
#endif
}

// Bytes 0x7fc0 repeated are a NaN in fp32, bf16 and fp16 and a huge index; the pattern alternates with a large number,
// since max(NaN, x) hides a NaN.
void poison(void* begin, size_t bytes) {
  auto* word = static_cast<unsigned short*>(begin);
  for (size_t i = 0; i < bytes / 2; ++i) word[i] = launch.poison;
}

void run_block() {
  const int n = launch.num_threads;
  launch.num_done = launch.num_at_barrier = launch.barrier_count = 0;
  ready.clear();
  for (int i = 0; i < n; ++i) start(fibers[i]);
  // Seed 0 takes threads in order and seed 1 backwards.  Further even seeds shuffle every round; odd ones follow one
  // fiber's newly released mates first, so that one warp runs far ahead of the others.
  const bool depth_first = launch.seed > 1 && launch.seed % 2 == 1;
  while (launch.num_done < n) {
    if (ready.empty()) fail("deadlock: every thread left waits, and nobody comes");
    running.swap(ready);
    ready.clear();
    if (launch.seed > 1) {
      shuffle_order(running);
    } else {
      std::vector<bool> is_ready(n, false);
      for (int i : running) is_ready[i] = true;
      running.clear();
      for (int i = 0; i < n; ++i) {
        const int index = launch.seed == 0 ? i : n - 1 - i;
        if (is_ready[index]) running.push_back(index);
      }
    }
    while (!running.empty()) {
      const int index = running.front();
      if (depth_first) {
        std::swap(running.front(), running.back());
        running.pop_back();
        resume(fibers[index]);
        if (!ready.empty()) {
          std::vector<int> mates(ready);
          shuffle_order(mates);
          ready.clear();
          mates.insert(mates.end(), running.begin(), running.end());
          running.swap(mates);
        }
      } else {
        for (int i : running) resume(fibers[i]);
        running.clear();
      }
    }
  }
}

void on_signal(int number, siginfo_t* info, void*) {
  if (!in_launch) {
    signal(number, SIG_DFL);
    raise(number);
    return;
  }
  const Thread& t = *current;
  const char* what = number == SIGSEGV || number == SIGBUS
                         ? "access outside of every buffer"
                         : "trap: misaligned access, array index out of range, or integer misuse";
  snprintf(launch.error, launch.error_size, "%s at address %p, block (%u, %u), thread (%u, %u)", what, info->si_addr,
           t.block.x, t.block.y, t.thread.x, t.thread.y);
  siglongjmp(escape, 1);
}

void prepare() {
  if (stacks) return;
  stacks = static_cast<char*>(mmap(nullptr, kMaxThreads * kStackBytes, PROT_READ | PROT_WRITE,
                                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
  auto* area = static_cast<char*>(mmap(nullptr, kMaxDynamicShared + 2 * kPage, PROT_READ | PROT_WRITE,
                                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
  mprotect(area, kPage, PROT_NONE);
  mprotect(area + kPage + kMaxDynamicShared, kPage, PROT_NONE);
  dynamic_area = area + kPage;
}

}  // namespace

void fail(const char* what) {
  const Thread& t = *current;
  snprintf(launch.error, launch.error_size, "%s: block (%u, %u), thread (%u, %u)", what, t.block.x, t.block.y,
           t.thread.x, t.thread.y);
  siglongjmp(escape, 1);
}

int lane() { return self().index & 31; }

void* dynamic_shared() { return dynamic_area + kMaxDynamicShared - dynamic_bytes; }

int block_barrier(int predicate) {
  Fiber& fiber = self();
  if (launch.num_done > 0) fail("__syncthreads after another thread has ended (divergent barrier)");
  fiber.state = kAtBarrier;
  launch.barrier_count += predicate != 0;
  if (++launch.num_at_barrier == launch.num_threads) release_barrier();
  to_scheduler();
  return launch.last_barrier_count;
}

unsigned long long meet(Kind kind, unsigned mask, unsigned long long value, int source) {
  Fiber& fiber = self();
  const int first = fiber.index & ~31;
  if (!(mask >> (fiber.index & 31) & 1)) fail("warp intrinsic whose mask leaves out the calling lane");
  fiber.state = kAtWarp;
  fiber.kind = kind;
  fiber.mask = mask;
  fiber.value = value;
  fiber.source = source;
  for (int i = 0; i < 32; ++i) {
    if (!(mask >> i & 1)) continue;
    if (first + i >= launch.num_threads) fail("warp intrinsic whose mask names lanes beyond the block");
    const Fiber& other = fibers[first + i];
    if (other.state == kDone) fail("warp intrinsic whose mask names a lane that has ended");
    if (other.state == kAtWarp && (other.kind != kind || other.mask != mask)) {
      fail("lanes of one mask meet in different warp intrinsics");
    }
    if (other.state != kAtWarp) {
      to_scheduler();
      return fiber.result;
    }
  }
  unsigned ballot = 0;
  unsigned sum = 0, low = ~0u, high = 0;
  int low_signed = 0x7fffffff, high_signed = -0x7fffffff - 1;
  for (int i = 0; i < 32; ++i) {
    if (!(mask >> i & 1)) continue;
    const auto word = static_cast<unsigned>(fibers[first + i].value);
    ballot |= (fibers[first + i].value != 0 ? 1u : 0u) << i;
    sum += word;
    low = word < low ? word : low;
    high = word > high ? word : high;
    low_signed = static_cast<int>(word) < low_signed ? static_cast<int>(word) : low_signed;
    high_signed = static_cast<int>(word) > high_signed ? static_cast<int>(word) : high_signed;
  }
  for (int i = 0; i < 32; ++i) {
    if (!(mask >> i & 1)) continue;
    Fiber& each = fibers[first + i];
    switch (kind) {
      case kSync: break;
      case kShuffle:
        // A lane outside the mask has no value to give.
        each.result = mask >> (each.source & 31) & 1 ? fibers[first + (each.source & 31)].value : 0x7fc07fc07fc07fc0ull;
        break;
      case kBallot: each.result = ballot; break;
      case kMatch:
        each.result = 0;
        for (int j = 0; j < 32; ++j) {
          if (mask >> j & 1 && fibers[first + j].value == each.value) each.result |= 1ull << j;
        }
        break;
      case kAddReduce: each.result = sum; break;
      case kMinReduce: each.result = low; break;
      case kMaxReduce: each.result = high; break;
      case kMinSigned: each.result = static_cast<unsigned>(low_signed); break;
      case kMaxSigned: each.result = static_cast<unsigned>(high_signed); break;
    }
  }
  for (int i = 0; i < 32; ++i) {
    if (mask >> i & 1) make_ready(fibers[first + i]);
  }
  to_scheduler();
  return fiber.result;
}

}  // namespace cuda_host

using namespace cuda_host;

// Returns 0, or 1 with a message in `error`.  `grid` and `block` hold three sizes each.
extern "C" int cuda_host_launch(const Kernel* kernel, void (*shared_segment)(void**, unsigned long*),
                                const unsigned* grid, const unsigned* block, unsigned shared_bytes, unsigned seed,
                                void** arguments, char* error, unsigned long error_size) {
  prepare();
  const unsigned threads = block[0] * block[1] * block[2];
  error[0] = 0;
  if (threads == 0 || threads > kMaxThreads || grid[0] == 0 || grid[1] == 0 || grid[2] == 0 || grid[1] > 65535 ||
      grid[2] > 65535 || shared_bytes > kMaxDynamicShared) {
    snprintf(error, error_size, "invalid launch: grid (%u, %u, %u), block (%u, %u, %u), %u shared bytes", grid[0],
             grid[1], grid[2], block[0], block[1], block[2], shared_bytes);
    return 1;
  }
  launch = Launch{kernel, arguments, static_cast<int>(threads), 0, 0, 0, 0, seed, seed * 0x9e3779b97f4a7c15ull + 1,
                  static_cast<unsigned short>(seed % 2 ? 0x7f00 : 0x7fc0), error, error_size};
  dynamic_bytes = (shared_bytes + 15) / 16 * 16;

  stack_t alternate = {}, old_stack;
  static char signal_stack[64 * 1024];
  alternate.ss_sp = signal_stack;
  alternate.ss_size = sizeof(signal_stack);
  sigaltstack(&alternate, &old_stack);
  struct sigaction action = {}, old_actions[3];
  action.sa_sigaction = on_signal;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  const int numbers[3] = {SIGSEGV, SIGBUS, SIGILL};
  for (int i = 0; i < 3; ++i) sigaction(numbers[i], &action, &old_actions[i]);

  static std::vector<unsigned long long> order;
  order.clear();
  const unsigned long long num_blocks = 1ull * grid[0] * grid[1] * grid[2];
  for (unsigned long long i = 0; i < num_blocks; ++i) order.push_back(seed == 1 ? num_blocks - 1 - i : i);
  if (seed > 1) shuffle_order(order);

  int failed = 0;
  static Thread nobody;
  current = &nobody;
  in_launch = true;
  if (sigsetjmp(escape, 1) == 0) {
    for (unsigned long long b : order) {
      const dim3 position{static_cast<unsigned>(b % grid[0]), static_cast<unsigned>(b / grid[0] % grid[1]),
                          static_cast<unsigned>(b / grid[0] / grid[1])};
      void* segment = nullptr;
      unsigned long segment_bytes = 0;
      shared_segment(&segment, &segment_bytes);
      if (segment) poison(segment, segment_bytes);
      poison(dynamic_shared(), dynamic_bytes);
      for (int i = 0; i < launch.num_threads; ++i) {
        Fiber& fiber = fibers[i];
        fiber.index = i;
        fiber.thread.block = position;
        fiber.thread.block_dim = {block[0], block[1], block[2]};
        fiber.thread.grid_dim = {grid[0], grid[1], grid[2]};
        fiber.thread.thread = {i % block[0], i / block[0] % block[1], i / block[0] / block[1]};
      }
      run_block();
    }
  } else {
    failed = 1;
  }
  in_launch = false;
  for (int i = 0; i < 3; ++i) sigaction(numbers[i], &old_actions[i], nullptr);
  sigaltstack(&old_stack, nullptr);
  return failed;
}
