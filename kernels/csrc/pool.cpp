#include "pool.h"

#include <immintrin.h>
#include <sched.h>

namespace trimaran {

namespace {
// About 50 us: longer than the pause between two kernels of a step.
constexpr int kSpins = 1000;
}  // namespace

Pool& Pool::get() {
  // Never destroyed: a worker may still be asleep when the process ends.
  static Pool* pool = new Pool();
  return *pool;
}

void Pool::resize(int num_threads) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stop_.store(true);
    epoch_.fetch_add(1);
  }
  wake_.notify_all();
  for (auto& worker : workers_) worker.join();
  workers_.clear();
  stop_.store(false);
  num_threads_ = num_threads;
  unsigned seen = epoch_.load();
  for (int i = 1; i < num_threads; ++i) workers_.emplace_back([this, seen] { serve(seen); });
}

void Pool::take_pieces() {
  for (;;) {
    long piece = next_.fetch_add(1, std::memory_order_relaxed);
    if (piece >= count_) return;
    work_(arg_, piece);
  }
}

void Pool::serve(unsigned seen) {
  for (;;) {
    int spins = 0;
    while (epoch_.load(std::memory_order_acquire) == seen && spins < kSpins) {
      _mm_pause();
      ++spins;
    }
    if (epoch_.load(std::memory_order_acquire) == seen) {
      std::unique_lock<std::mutex> lock(mutex_);
      sleeping_.fetch_add(1);
      wake_.wait(lock, [&] { return epoch_.load() != seen; });
      sleeping_.fetch_sub(1);
    }
    ++seen;
    if (stop_.load()) return;
    take_pieces();
    busy_.fetch_sub(1, std::memory_order_release);
  }
}

void Pool::run(Work work, void* arg, long count) {
  if (num_threads_ == 1 || count == 1) {
    for (long piece = 0; piece < count; ++piece) work(arg, piece);
    return;
  }
  work_ = work;
  arg_ = arg;
  count_ = count;
  next_.store(0, std::memory_order_relaxed);
  busy_.store(num_threads_ - 1, std::memory_order_relaxed);
  epoch_.fetch_add(1);
  if (sleeping_.load() > 0) {
    std::lock_guard<std::mutex> lock(mutex_);
    wake_.notify_all();
  }
  take_pieces();
  // Another process may hold the worker's core: let it go rather than spin against it.
  for (int spins = 0; busy_.load(std::memory_order_acquire) > 0; ++spins) {
    if (spins < kSpins)
      _mm_pause();
    else
      sched_yield();
  }
}

}  // namespace trimaran
