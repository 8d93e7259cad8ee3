// Memory that the processes of one host share, and the processes themselves: who lives, who is woken, and where the
// others' memory is. Every word has one writer unless said otherwise; zero is the state it starts in.
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

constexpr std::size_t kSharedLine = 64;  // what one writer has for itself; torch's alignment, too
constexpr std::size_t kSharedNotices = 64;

using SharedWord = std::atomic<std::uint32_t>;
using SharedNumber = std::atomic<std::uint64_t>;
static_assert(SharedWord::is_always_lock_free && SharedNumber::is_always_lock_free, "a lock is not shared memory's");

constexpr std::size_t whole_lines(std::size_t bytes) {
  return (bytes + kSharedLine - 1) / kSharedLine * kSharedLine;
}

struct alignas(kSharedLine) DoorbellWords {
  SharedWord rings;    // written by whoever wakes the owner
  SharedWord sleeper;  // what the owner sleeps for; set by the owner, unset by whoever wakes it
};

// Of the programs whose number leaves the same remainder the last one's: a rank makes a program and runs it with the
// others, and has opened their rings when it comes to the next.
struct ProgramNotice {
  SharedNumber ready;  // ready_notice(); written last
  std::uint64_t bytes;
  std::uint64_t fingerprint;
};

constexpr std::uint64_t ready_notice(std::size_t program, int descriptor) {
  return (static_cast<std::uint64_t>(program) + 1) << 32 | static_cast<std::uint32_t>(descriptor);
}

struct LinkBoard {
  static constexpr std::uint64_t kMagic = 0x3265706970747366;

  std::uint64_t magic;
  std::uint64_t nonce;
  DoorbellWords doorbell;
  // Where devices copy messages: 1 + the rank because of which this one has let go of its queues. What it sends from
  // then on may be no message. Written once.
  SharedWord let_go;
  ProgramNotice copies;  // of the words of copy engines, which are one segment for all programs
  ProgramNotice programs[kSharedNotices];
};

// How long to look before sleeping: a few microseconds; zero with as many ranks as cores, as who looks would keep a
// core from the one that it waits for.
Clock::duration usual_spin(std::int32_t num_ranks);

// So that nothing else is taken for a rank's memory.
std::uint64_t random_nonce();

// Between two looks.
inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// A file descriptor that is closed when its owner goes.
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

// Memory that two processes map. It has no name, so nobody can guess it and nothing is left behind when all who map it
// are gone, however they went. The one who made it gives its descriptor's number to others, who open it through /proc.
class SharedMemorySegment final {
 public:
  // Zeroed and sealed: its size can never change, so that nobody can be made to fault on it.
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
  void forget_descriptor() { descriptor_ = SharedMemoryDescriptor(); }

  SharedMemoryDescriptor descriptor_;
  std::byte* data_;
  std::size_t size_;
};

// How a rank sleeps until another process has done something for it.

// How long a rank sleeps before it looks whether the one that it waits for still lives.
constexpr int kSliceMilliseconds = 50;

// What a rank sleeps for.
constexpr std::uint32_t kNoSleeper = 0;
constexpr std::uint32_t kForSpace = 1;  // a cell, or a place in a ring
constexpr std::uint32_t for_channel(std::int32_t channel) {
  return static_cast<std::uint32_t>(channel) + 2;
}
// On a board that knows no channels.
constexpr std::uint32_t for_rank(std::int32_t rank) {
  return static_cast<std::uint32_t>(rank) + 1;
}

// No wake-up is lost. The owner  (1) reads `rings`, (2) writes `sleeper`, (3) looks at what it waits for, and
// (4) sleeps if `rings` is still what it was. Whoever changes what the owner may wait for  (a) changes it,
// (b) reads `sleeper`, and, if it is set, (c) unsets it, (d) changes `rings`, (e) wakes. (2), (3), (a) and (b) are
// sequentially consistent, so that they have one order for all: if (b) does not see (2), then (3), which follows (2),
// sees (a), and the owner does not sleep. If (b) sees (2), then (d) comes after (1), so that the owner does not fall
// asleep at (4), or sleeps already and is woken by (e). Two who ring at once do not harm: one does (d) and (e), and
// both have done (a) before. Who dies between (c) and (e) leaves the owner asleep, but not for longer than its
// slice: every sleep is bounded, and the owner looks again.
class SharedMemoryDoorbell final {
 public:
  explicit SharedMemoryDoorbell(DoorbellWords& words) : words_(words) {}

  // By others, after the change, which must have been a sequentially consistent store. Makes no system call unless the
  // owner sleeps for this.
  void ring(std::uint32_t reason) const;
  // The same whatever the owner sleeps for.
  void ring_always() const;

  // By the owner: steps 1 and 2, ...
  std::uint32_t lie_down(std::uint32_t reason) const;
  // ... and after a look either 4 (false: the time was over), ...
  bool sleep(std::uint32_t rings, int milliseconds) const;
  // ... or not.
  void get_up() const { words_.sleeper.store(kNoSleeper, std::memory_order_relaxed); }

 private:
  void wake() const;

  DoorbellWords& words_;
};

// Another process of this host: whether it lives, and what it shares.

// What a rank tells the others, by any means, so that they find its memory.
struct BoardAddress {
  pid_t process;
  int descriptor;
  std::uint64_t nonce;  // so that nothing else is taken for it
};

class SharedMemoryProcess final {
 public:
  SharedMemoryProcess(std::int32_t rank, pid_t process);

  std::int32_t rank() const { return rank_; }
  bool alive() const;
  // The process's own memory; throws Error when it is not what it should be.
  std::shared_ptr<SharedMemorySegment> open(int descriptor, std::size_t bytes) const;

 private:
  std::int32_t rank_;
  pid_t process_;
  SharedMemoryDescriptor watch_;  // of the process: readable when it is dead, and never another's that got its number
};

// A board: memory that one rank of a host writes and all others read, found by its address.

// Words: what lies on it; it begins with a magic number, a nonce and a doorbell.
template <typename Words>
class SharedMemoryBoard final {
 public:
  // This rank's own.
  SharedMemoryBoard() : memory_(SharedMemorySegment::make(sizeof(Words))) {
    words().magic = Words::kMagic;
    words().nonce = random_nonce();
  }
  // Another's. Throws Error when its memory cannot be had, or is not what it should be.
  SharedMemoryBoard(const SharedMemoryProcess& owner, const BoardAddress& address)
      : memory_(owner.open(address.descriptor, sizeof(Words))) {
    if (words().magic == Words::kMagic && words().nonce == address.nonce) return;
    throw Error("shared memory: what rank " + std::to_string(owner.rank()) +
                " gave is not its board; run the same version of fastpipe on every rank");
  }

  // Of this rank's own.
  BoardAddress address() const { return {::getpid(), memory_->descriptor(), words().nonce}; }
  Words& words() const { return *memory_->template at<Words>(0); }
  SharedMemoryDoorbell doorbell() const { return SharedMemoryDoorbell(words().doorbell); }

 private:
  std::shared_ptr<SharedMemorySegment> memory_;
};

// Another rank of this host, as a process and by what it shares.
class SharedMemoryPeer final {
 public:
  SharedMemoryPeer(std::int32_t rank, const BoardAddress& address);

  std::int32_t rank() const { return process_.rank(); }
  bool alive() const { return process_.alive(); }
  SharedMemoryDoorbell doorbell() const { return board_.doorbell(); }
  // See LinkBoard.
  std::uint32_t let_go() const { return board_.words().let_go.load(); }
  // The process's own memory; throws Error when it is not what it should be.
  std::shared_ptr<SharedMemorySegment> open(int descriptor, std::size_t bytes) const {
    return process_.open(descriptor, bytes);
  }
  // The rings that it sends on in a program; null as long as it has none.
  std::shared_ptr<SharedMemorySegment> rings(std::size_t program, std::uint64_t fingerprint) const;
  // The words of the channels on which it receives by copy engines; null as long as it has none.
  std::shared_ptr<SharedMemorySegment> copies() const;

 private:
  SharedMemoryProcess process_;
  SharedMemoryBoard<LinkBoard> board_;
};

// A rank's side of the shared memory of its host, for all the programs of a pipeline.
class SharedMemoryLink final {
 public:
  // spin: how long to look before sleeping. check: called now and then by who waits; what it throws ends the wait.
  SharedMemoryLink(
      std::int32_t rank, std::int32_t num_ranks, Clock::duration spin, void (*check)() = [] {})
      : rank_(rank), spin_(spin), check_(check), peers_(num_ranks) {}

  std::int32_t rank() const { return rank_; }
  std::size_t num_ranks() const { return peers_.size(); }
  BoardAddress address() const { return board_.address(); }
  // Throws Error when its memory cannot be had, or is not what it should be.
  void connect(std::int32_t rank, const BoardAddress& address);

  const std::shared_ptr<SharedMemoryPeer>& peer(std::int32_t rank) const;
  SharedMemoryDoorbell doorbell() const { return board_.doorbell(); }
  Clock::duration spin() const { return spin_; }
  void check() const { check_(); }
  // From any thread: a rank is gone, or one that is not known (-1). Nothing is waited for any more.
  void lose(std::int32_t rank);
  std::optional<std::int32_t> lost() const;
  // This rank's own word; see LinkBoard.
  SharedWord& let_go() const { return board_.words().let_go; }
  // One that has let go of its queues, and because of whom; nothing when all wait for each other.
  std::optional<std::pair<std::int32_t, std::int32_t>> find_let_go() const;

  // The next program's number. Every rank makes its programs in the same order.
  std::size_t number_program() { return num_programs_++; }
  // Shows the others the rings that this rank sends on in a program.
  void publish(std::size_t program, const SharedMemorySegment& rings, std::uint64_t fingerprint);
  // Shows the others the words of the channels on which this rank receives by copy engines.
  void publish_copies(const SharedMemorySegment& words);

 private:
  static constexpr std::int32_t kNobody = -2;

  std::int32_t rank_;
  Clock::duration spin_;
  void (*check_)();
  std::atomic<std::int32_t> lost_{kNobody};
  SharedMemoryBoard<LinkBoard> board_;
  std::vector<std::shared_ptr<SharedMemoryPeer>> peers_;  // by rank; null for this one
  std::size_t num_programs_ = 0;
};

}  // namespace fastpipe
