// A thread pool for one kernel call at a time; threads take numbered work items.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

namespace trimaran {

// Runs `work(arg, item)` for items 0 to count - 1 on all threads; returns when all are done.
// One caller at a time.
//
// The caller waits for items, not for threads: a sleeping or preempted worker does not delay
// the call. Workers spin for a short while after a call, since the next call of a model's step
// comes within microseconds, and then sleep in the kernel: an idle engine takes no CPU time.
class Pool {
 public:
  using Work = void (*)(void* arg, long item);

  static Pool& get();

  // Threads including the caller. Joins the old workers and starts new ones.
  void resize(int num_threads);
  int size() const { return num_threads_; }

  void run(Work work, void* arg, long count);

  template <class F>
  void each(long count, F&& body) {
    run([](void* arg, long item) { (*static_cast<F*>(arg))(item); }, &body, count);
  }

 private:
  Pool() = default;
  ~Pool() { resize(1); }
  void serve();
  void take_items();
  void run_batch(long first, long count);

  int num_threads_ = 1;
  std::vector<std::thread> workers_;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::atomic<int> sleeping_{0};
  std::atomic<bool> stop_{false};
  // Read by threads that hold an item: the call cannot end, nor these change, before that item
  // is done.
  Work work_ = nullptr;
  void* arg_ = nullptr;
  long first_ = 0;
  uint64_t calls_ = 0;
  // The call's number (32 bits), its number of items (16) and the next item (16), in one word:
  // a late thread sees from this word alone that no work is left.
  alignas(64) std::atomic<uint64_t> ticket_{0};
  alignas(64) std::atomic<long> done_{0};
};

}  // namespace trimaran
