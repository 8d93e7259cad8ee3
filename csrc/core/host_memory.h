// Memory that processes of one host share, the processes themselves, and how one wakes another. Everything else in
// shared memory (shared_memory_transport.h, shared_memory_exchange.h, copy_engine_transport.h) is built of this.
//
// Rules for all shared words:
// * They are atomics or, where another word publishes them, plain; zero is the state that they start in. There are no
//   locks, so a process that is killed at any instruction leaves none behind.
// * Each word has one writer, unless its comment says otherwise.
// * Atomics are sequentially consistent where nothing else is written. That costs an exchange instead of a store on
//   x86, once a message, and the wake-up below depends on it. `relaxed` has its reason beside it.
//
// Wake-ups. A rank sleeps on its own SharedMemoryWakeup, and whoever changes what it may wait for wakes it: an
// eventcount, with a futex. No wake-up is lost:
//   the owner  (1) reads `count`            the other  (a) changes what is waited for
//              (2) writes `waiting_for`                (b) reads `waiting_for`; if it is set
//              (3) looks at what it waits for          (c) unsets it
//              (4) sleeps if `count` is as in (1)      (d) increments `count`
//                                                      (e) wakes
// (2), (3), (a) and (b) are sequentially consistent, so they have one order. If (b) does not see (2), then (3), which
// comes after (2), sees (a), and the owner does not sleep. If (b) sees (2), then (d) comes after (1): the owner does
// not fall asleep at (4), or sleeps already and is woken by (e). Two that wake at once do no harm: one does (d) and
// (e), and both have done (a) before.
//
// Killed processes. A process that dies between (c) and (e) leaves the owner asleep, but every sleep is bounded by a
// slice, after which the owner looks again, and asks whether the peer lives. The kernel answers by a pidfd, which never
// stands for another process that got the same number. Memory lives as long as any process maps it; what was not
// opened before its owner died can no longer be opened, and says so.
#pragma once

#include <sys/types.h>
#include <unistd.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "common.h"

namespace fastpipe {

constexpr std::size_t kSharedLine = 64;  // a cache line, which has one writer; torch's alignment, too

using SharedWord = std::atomic<std::uint32_t>;
using SharedNumber = std::atomic<std::uint64_t>;
static_assert(SharedWord::is_always_lock_free && SharedNumber::is_always_lock_free, "a lock cannot be shared");

constexpr std::size_t whole_lines(std::size_t bytes) {
  return (bytes + kSharedLine - 1) / kSharedLine * kSharedLine;
}

// How long to poll before sleeping, by how many ranks may run on this rank's cores, itself included: a few
// microseconds; zero with as many ranks as cores, where polling would take a core from the rank that is waited for;
// longer alone.
Clock::duration usual_spin(std::int32_t num_sharing);

// Looks once, then polls for so long.
bool comes_true_soon(Clock::duration spin, FunctionRef<bool()> ready);

// --- segments -------------------------------------------------------------------------------------------------------

// A file descriptor that is closed with its owner.
class SharedMemoryDescriptor final {
 public:
  SharedMemoryDescriptor() = default;
  explicit SharedMemoryDescriptor(int number) : number_(number) {}
  SharedMemoryDescriptor(const SharedMemoryDescriptor&) = delete;
  SharedMemoryDescriptor& operator=(const SharedMemoryDescriptor&) = delete;
  SharedMemoryDescriptor(SharedMemoryDescriptor&& other) noexcept : number_(std::exchange(other.number_, -1)) {}
  SharedMemoryDescriptor& operator=(SharedMemoryDescriptor&& other) noexcept {
    std::swap(number_, other.number_);
    return *this;
  }
  ~SharedMemoryDescriptor() {
    if (number_ >= 0) ::close(number_);
  }

  int number() const { return number_; }

 private:
  int number_ = -1;
};

// This process cannot get or map memory, or has no descriptor for it.
class OutOfMemory final : public Error {
 public:
  using Error::Error;
};

// Memory that processes map. It has no name: nobody can guess it, and nothing is left behind when all that map it are
// gone, however they went. Others open it through /proc, by the process that made it and its descriptor there.
class SharedMemorySegment final {
 public:
  // Zeroed and sealed: its size can never change, so an access to a mapping never faults.
  static std::shared_ptr<SharedMemorySegment> make(std::size_t bytes);
  // What another process made: refused unless it is sealed memory of the same user and of that size.
  static std::shared_ptr<SharedMemorySegment> open(pid_t owner, int descriptor, std::size_t bytes);

  SharedMemorySegment(SharedMemoryDescriptor descriptor, std::size_t bytes);
  SharedMemorySegment(const SharedMemorySegment&) = delete;
  SharedMemorySegment& operator=(const SharedMemorySegment&) = delete;
  ~SharedMemorySegment();

  std::byte* data() const { return data_; }
  std::size_t size() const { return size_; }
  // By which others open it; -1 where it was opened itself.
  int descriptor() const { return descriptor_.number(); }
  template <typename T>
  T* at(std::size_t offset) const {
    return reinterpret_cast<T*>(data_ + offset);
  }

 private:
  void close_descriptor() { descriptor_ = SharedMemoryDescriptor(); }

  SharedMemoryDescriptor descriptor_;
  std::byte* data_;
  std::size_t size_;
};

// --- wake-ups -------------------------------------------------------------------------------------------------------

// How long a rank sleeps before it looks whether the rank that it waits for lives.
constexpr int kSliceMilliseconds = 50;

// What a rank waits for.
constexpr std::uint32_t kNotWaiting = 0;
constexpr std::uint32_t kForSpace = 1;  // a cell, or a place in a ring
constexpr std::uint32_t for_channel(std::int32_t channel) {
  return static_cast<std::uint32_t>(channel) + 2;
}
// In an exchange, which has no channels.
constexpr std::uint32_t for_rank(std::int32_t rank) {
  return static_cast<std::uint32_t>(rank) + 1;
}

// Words in shared memory; the steps are those at the top of this file.
class alignas(kSharedLine) SharedMemoryWakeup final {
 public:
  // By others, (b) to (e), after (a), which must have been a sequentially consistent store. No system call unless the
  // owner waits for this.
  void notify(std::uint32_t reason);
  // The same whatever the owner waits for.
  void notify_any();

  enum class Waited { kNot, kUntilWoken, kForSlice };
  // By the owner, (1) to (4): not if `ready`, which is the look of (3), finds what is waited for.
  Waited wait(std::uint32_t reason, FunctionRef<bool()> ready);

 private:
  void wake();

  SharedWord count_;        // of wake-ups; written by any process that wakes the owner
  SharedWord waiting_for_;  // a reason; set by the owner, unset by the owner and by any process that wakes it
};

// --- processes, and what each publishes -----------------------------------------------------------------------------

// What a rank sends the others by any means, so that they find what it publishes.
struct PublishedAddress {
  pid_t process;
  int descriptor;
  std::uint64_t nonce;  // so that nothing else is taken for it
};

// With these begins memory that one rank of a host writes and all others read. The first two are written before the
// address leaves the process.
struct PublishedWords {
  std::uint64_t magic;
  std::uint64_t nonce;
  SharedMemoryWakeup wakeup;
};

// This rank's own.
std::shared_ptr<SharedMemorySegment> make_published(std::size_t bytes, std::uint64_t magic);
PublishedAddress address_of(const SharedMemorySegment& published);

// Another rank of this host, as a process and by what it publishes.
class SharedMemoryPeer final {
 public:
  // Throws Error when its memory cannot be had, or is not what it should be.
  SharedMemoryPeer(std::int32_t rank, const PublishedAddress& address, std::size_t bytes, std::uint64_t magic);

  std::int32_t rank() const { return rank_; }
  bool alive() const;
  template <typename Words>
  Words& words() const {
    return *published_->at<Words>(0);
  }
  SharedMemoryWakeup& wakeup() const { return words<PublishedWords>().wakeup; }
  // The process's own memory; throws Error when it is not what it should be.
  std::shared_ptr<SharedMemorySegment> open(int descriptor, std::size_t bytes) const;

 private:
  std::int32_t rank_;
  pid_t process_;
  SharedMemoryDescriptor pidfd_;  // readable when the process is dead
  std::shared_ptr<SharedMemorySegment> published_;
};

// --- the link of a rank to the others of its host -------------------------------------------------------------------

// A segment that a rank publishes, one a program. `ready` is written last and read first: it publishes the others.
struct PublishedSegment {
  SharedNumber ready;  // ready_value()
  std::uint64_t bytes;
  std::uint64_t fingerprint;
};

constexpr std::uint64_t ready_value(std::size_t program, int descriptor) {
  return (static_cast<std::uint64_t>(program) + 1) << 32 | static_cast<std::uint32_t>(descriptor);
}

// Of the programs whose number leaves the same remainder the last one's is published. A rank makes a program and runs
// it with the others, and has opened their rings when it comes to the next: so none is overwritten before it is read.
constexpr std::size_t kNumPrograms = 64;

struct LinkWords : PublishedWords {
  static constexpr std::uint64_t kMagic = 0x3265706970747366;

  // Where devices copy messages: 1 + the rank because of which this one has aborted its queues. What it sends from then
  // on may be no message. Written once.
  SharedWord aborted_by;
  PublishedSegment copies;  // the words of copy engines, which are one segment for all programs
  PublishedSegment programs[kNumPrograms];
};

// The rings that a rank sends on in a program; null as long as it has none.
std::shared_ptr<SharedMemorySegment> rings_of(const SharedMemoryPeer& peer, std::size_t program,
                                              std::uint64_t fingerprint);
// The words of the channels on which a rank receives by copy engines; null as long as it has none.
std::shared_ptr<SharedMemorySegment> copies_of(const SharedMemoryPeer& peer);

// A rank's side of the shared memory of its host, for all the programs of a pipeline.
class SharedMemoryLink final {
 public:
  // spin: how long to poll before sleeping. check: called now and then during a wait; what it throws ends the wait.
  SharedMemoryLink(
      std::int32_t rank, std::int32_t num_ranks, Clock::duration spin, void (*check)() = [] {})
      : rank_(rank), spin_(spin), check_(check), peers_(num_ranks) {}

  std::int32_t rank() const { return rank_; }
  std::size_t num_ranks() const { return peers_.size(); }
  PublishedAddress address() const { return address_of(*published_); }
  // Throws Error when its memory cannot be had, or is not what it should be.
  void connect(std::int32_t rank, const PublishedAddress& address);

  const std::shared_ptr<SharedMemoryPeer>& peer(std::int32_t rank) const;
  SharedMemoryWakeup& wakeup() const { return words().wakeup; }
  Clock::duration spin() const { return spin_; }
  void check() const { check_(); }
  // From any thread: a rank is lost, or one that is not known (-1). All waits end.
  void lose(std::int32_t rank);
  std::optional<std::int32_t> lost() const;
  // This rank's own word; see LinkWords.
  SharedWord& aborted_by() const { return words().aborted_by; }
  // A rank that has aborted its queues, and because of which; nothing where there is none.
  std::optional<std::pair<std::int32_t, std::int32_t>> find_abort() const;

  // The next program's number. Every rank makes its programs in the same order.
  std::size_t number_program() { return num_programs_++; }
  // Shows the others the rings that this rank sends on in a program.
  void publish(std::size_t program, const SharedMemorySegment& rings, std::uint64_t fingerprint);
  // Shows the others the words of the channels on which this rank receives by copy engines.
  void publish_copies(const SharedMemorySegment& segment);

 private:
  static constexpr std::int32_t kNobody = -2;

  LinkWords& words() const { return *published_->at<LinkWords>(0); }

  std::int32_t rank_;
  Clock::duration spin_;
  void (*check_)();
  std::atomic<std::int32_t> lost_{kNobody};
  std::shared_ptr<SharedMemorySegment> published_ = make_published(sizeof(LinkWords), LinkWords::kMagic);
  std::vector<std::shared_ptr<SharedMemoryPeer>> peers_;  // by rank; null for this one
  std::size_t num_programs_ = 0;
};

}  // namespace fastpipe
