// A pool of threads that sleep between steps, working memory, and the rounding mode of each call.
#pragma once

#include <unistd.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstdlib>
#include <mutex>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace blockrelay {

// Sets rounding to nearest, with subnormals, while it exists, whatever another library has set in this thread.
class StandardRounding {
 public:
#if defined(__x86_64__)
  StandardRounding() : saved_(_mm_getcsr()) { _mm_setcsr(0x1F80); }
  ~StandardRounding() { _mm_setcsr(saved_); }

 private:
  unsigned saved_;
#elif defined(__aarch64__)
  StandardRounding() {
    __asm__ volatile("mrs %0, fpcr" : "=r"(saved_));
    __asm__ volatile("msr fpcr, %0" ::"r"(uint64_t(0)));
  }
  ~StandardRounding() { __asm__ volatile("msr fpcr, %0" ::"r"(saved_)); }

 private:
  uint64_t saved_;
#else
  StandardRounding() {}
#endif
};

// Returns this thread's working memory of at least `count` floats, 64-byte aligned, not set; null if out of memory.
inline float* scratch(size_t count) {
  struct Block {
    float* data = nullptr;
    size_t size = 0;
    ~Block() { std::free(data); }
  };
  static thread_local Block block;
  if (count > block.size) {
    size_t rounded = (count + 1023) / 1024 * 1024;
    std::free(block.data);
    block.data = static_cast<float*>(std::aligned_alloc(64, rounded * sizeof(float)));
    block.size = block.data ? rounded : 0;
  }
  return block.data;
}

// Spins until `ready` returns true, for 60 microseconds, about the time between two calls of a step: waking a sleeping
// thread takes the system 20 to 50 microseconds, and a step makes a hundred calls. Returns false when the time is over.
template <class Ready>
inline bool spin_until(const Ready& ready) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::microseconds(60);
  do {
    for (int i = 0; i < 32; i++) {
      if (ready()) return true;
#if defined(__x86_64__)
      _mm_pause();
#endif
    }
  } while (std::chrono::steady_clock::now() < end);
  return false;
}

class Pool {
 public:
  static constexpr int64_t kWorthSharing = 200000;  // the least cost to share with threads that are awake

  // Starts `threads` - 1 threads; the caller of run() is the other one. Throws std::system_error.
  explicit Pool(int threads) : process_(getpid()) {
    try {
      for (int i = 1; i < threads; i++) threads_.emplace_back([this] { serve(); });
    } catch (...) {
      stop();
      throw;
    }
  }
  ~Pool() { stop(); }
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  int threads() const { return int(threads_.size()) + 1; }

  // Calls work(begin, end) until 0..count-1 is covered, `grain` items at a time. Items must be independent, since any
  // thread may take any item. `cost` is the rough number of float operations: a cheap call is not worth waking threads.
  // Returns false if a call of work returned false.
  template <class Work>
  bool run(int64_t count, int64_t grain, int64_t cost, const Work& work) {
    // One parallel call at a time; another caller, or a forked child (which has no threads), works alone.
    if (threads_.empty() || count <= grain || getpid() != process_) return work(0, count);
    if (cost < (sleeping_.load(std::memory_order_relaxed) ? kWorthWaking : kWorthSharing)) return work(0, count);
    std::unique_lock<std::mutex> only(run_mutex_, std::try_to_lock);
    if (!only.owns_lock()) return work(0, count);
    bool wake;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      call_ = [](const void* w, int64_t begin, int64_t end) { return (*static_cast<const Work*>(w))(begin, end); };
      work_ = &work;
      count_ = count;
      grain_ = grain;
      next_.store(0, std::memory_order_relaxed);
      ok_.store(true, std::memory_order_relaxed);
      open_ = true;
      generation_.fetch_add(1, std::memory_order_release);
      wake = sleeping_ > 0;
    }
    if (wake) start_.notify_all();
    take();
    // Threads that have not begun yet are not waited for: on a busy machine they may take long to wake.
    {
      std::lock_guard<std::mutex> lock(mutex_);
      open_ = false;
    }
    if (!spin_until([this] { return active_.load(std::memory_order_acquire) == 0; })) {
      std::unique_lock<std::mutex> lock(mutex_);
      done_.wait(lock, [this] { return active_.load(std::memory_order_acquire) == 0; });
    }
    return ok_.load(std::memory_order_relaxed);
  }

 private:
  static constexpr int64_t kWorthWaking = 1000000;  // cost of about 15 microseconds, as long as waking a thread

  void take() {
    for (;;) {
      int64_t begin = next_.fetch_add(grain_, std::memory_order_relaxed);
      if (begin >= count_) return;
      int64_t end = begin + grain_ < count_ ? begin + grain_ : count_;
      if (!call_(work_, begin, end)) ok_.store(false, std::memory_order_relaxed);
    }
  }

  void serve() {
    StandardRounding rounding;
    uint64_t seen = 0;
    for (;;) {
      spin_until([&] { return generation_.load(std::memory_order_acquire) != seen; });
      std::unique_lock<std::mutex> lock(mutex_);
      const auto called = [&] { return stopping_ || (open_ && generation_.load(std::memory_order_relaxed) != seen); };
      if (!called()) {
        sleeping_++;
        start_.wait(lock, called);
        sleeping_--;
      }
      if (stopping_) return;
      seen = generation_.load(std::memory_order_relaxed);
      active_.fetch_add(1, std::memory_order_relaxed);
      lock.unlock();
      take();
      lock.lock();
      if (active_.fetch_sub(1, std::memory_order_release) == 1) done_.notify_one();
    }
  }

  void stop() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      stopping_ = true;
    }
    start_.notify_all();
    for (auto& thread : threads_) thread.join();
  }

  const pid_t process_;
  std::vector<std::thread> threads_;
  std::mutex run_mutex_;
  std::mutex mutex_;
  std::condition_variable start_;
  std::condition_variable done_;
  std::atomic<uint64_t> generation_{0};
  std::atomic<int> active_{0};    // threads inside take(), without the caller
  std::atomic<int> sleeping_{0};  // threads that need a notification; changed under mutex_
  bool open_ = false;  // true while threads may join the current call
  bool stopping_ = false;
  bool (*call_)(const void*, int64_t, int64_t) = nullptr;
  const void* work_ = nullptr;
  int64_t count_ = 0;
  int64_t grain_ = 1;
  std::atomic<int64_t> next_{0};
  std::atomic<bool> ok_{true};
};

}  // namespace blockrelay
