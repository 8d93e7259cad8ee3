// What lies in shared memory. Every word has one writer unless said otherwise; zero is the state it starts in.
//
// A rank has one board, for as long as its pipeline lives: its doorbell, and for each program the descriptor of the
// segment with the rings of the channels that it sends on. What is sent lies in cells of further segments, which the
// sender makes as it learns how large its messages are.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

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

// Of one channel. Its entries follow.
struct RingWords {
  alignas(kSharedLine) SharedNumber sent;  // entries ever written
  std::uint64_t num_entries;
  alignas(kSharedLine) SharedNumber taken;  // entries ever read; the receiver's
  alignas(kSharedLine) SharedWord starved;  // the sender has a message for which there was no place
};

// One message, by value: the receiver has read it before it counts it as taken.
struct alignas(kSharedLine) RingEntry {
  std::int32_t stage;  // that consumes it
  std::int32_t microbatch;
  std::uint32_t stand_in;
  std::uint32_t announced;
  std::uint64_t bytes;
  std::uint64_t segment;  // numbered by the sender, from 1
  std::uint64_t segment_bytes;
  std::uint64_t offset;  // of the cell's words in the segment; the message follows them
  std::int32_t descriptor;
};
static_assert(sizeof(RingEntry) == kSharedLine);

// Of a segment with cells.
struct alignas(kSharedLine) CellSegmentWords {
  SharedWord retired;  // no further message will come in it
};

// Free (0), or the message's number and a mark. Made used by the sender, free by the receiver.
struct alignas(kSharedLine) CellWords {
  SharedNumber state;
};

constexpr std::uint64_t kCellFree = 0;
// Its message waits, or a stage uses it: the program says when it will be free.
constexpr std::uint64_t used_cell(std::uint64_t message) {
  return message << 1 | 1;
}
// The program has freed it, but somebody holds a tensor in it: nobody knows when it will be free.
constexpr std::uint64_t kHeldMark = std::uint64_t{1} << 63;

// What a rank says to all others, of two exchanges: that of an odd number and that of an even one.
constexpr std::size_t kExchangeText = 16384;

struct ExchangeNote {
  std::uint64_t bytes;
  std::int32_t descriptor;  // of the memory that it lies in; -1: in `text`
  alignas(kSharedLine) std::byte text[kExchangeText];
};

struct ExchangeBoard {
  static constexpr std::uint64_t kMagic = 0x3178657069707466;

  std::uint64_t magic;
  std::uint64_t nonce;
  DoorbellWords doorbell;
  alignas(kSharedLine) SharedNumber posted;  // notes ever written; written last
  alignas(kSharedLine) ExchangeNote notes[2];
};

}  // namespace fastpipe
