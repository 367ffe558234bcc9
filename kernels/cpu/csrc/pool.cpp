#include "pool.h"

#include <immintrin.h>
#include <sched.h>

#include <algorithm>

namespace trimaran {

namespace {

// About 50 us: longer than the pause between two kernels of a step.
constexpr int kSpins = 1000;
constexpr uint64_t kField = 0xffff;

bool has_item(uint64_t ticket) { return (ticket & kField) < (ticket >> 16 & kField); }

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
  }
  wake_.notify_all();
  for (auto& worker : workers_) worker.join();
  workers_.clear();
  stop_.store(false);
  num_threads_ = num_threads;
  for (int i = 1; i < num_threads; ++i) workers_.emplace_back([this] { serve(); });
}

void Pool::take_items() {
  uint64_t ticket = ticket_.load(std::memory_order_acquire);
  while (has_item(ticket)) {
    if (!ticket_.compare_exchange_weak(ticket, ticket + 1, std::memory_order_acq_rel)) continue;
    work_(arg_, first_ + (long)(ticket & kField));
    done_.fetch_add(1, std::memory_order_release);
    ticket = ticket_.load(std::memory_order_acquire);
  }
}

void Pool::serve() {
  while (!stop_.load(std::memory_order_relaxed)) {
    take_items();
    int spins = 0;
    while (!has_item(ticket_.load(std::memory_order_relaxed)) && spins < kSpins) {
      _mm_pause();
      ++spins;
    }
    if (spins < kSpins) continue;
    std::unique_lock<std::mutex> lock(mutex_);
    sleeping_.fetch_add(1);
    wake_.wait(lock, [&] { return stop_.load() || has_item(ticket_.load()); });
    sleeping_.fetch_sub(1);
  }
}

void Pool::run(Work work, void* arg, long count) {
  if (num_threads_ == 1 || count == 1) {
    for (long item = 0; item < count; ++item) work(arg, item);
    return;
  }
  work_ = work;
  arg_ = arg;
  for (long first = 0; first < count; first += kField)
    run_batch(first, std::min<long>(count - first, kField));
}

void Pool::run_batch(long first, long count) {
  first_ = first;
  done_.store(0, std::memory_order_relaxed);
  // Pairs with the worker, which counts itself asleep before it checks the ticket.
  ticket_.store(++calls_ << 32 | (uint64_t)count << 16, std::memory_order_seq_cst);
  if (sleeping_.load(std::memory_order_seq_cst) > 0) {
    std::lock_guard<std::mutex> lock(mutex_);
    wake_.notify_all();
  }
  take_items();
  // Another process may run on the worker's core: yield instead of spinning.
  for (int spins = 0; done_.load(std::memory_order_acquire) < count; ++spins) {
    if (spins < kSpins)
      _mm_pause();
    else
      sched_yield();
  }
}

}  // namespace trimaran
