// Transport between processes of one host: messages lie in memory that both map, and the consumer computes on it there.
//
// The protocol. Every channel has a ring of entries, and cells for messages in segments; both are memory of its sender.
//   sender    finds a free cell, in a segment of the channel or in a new one; writes the message; marks the cell used;
//             writes the ring's next entry, which says where the message is; increments `sent`; wakes the receiver if
//             that waits for this channel.
//   receiver  sees `sent`; copies the entry; increments `taken`. Its tensors lie in the cell, and hold a lease of it.
//             It frees the cell when the last of them dies, in whatever thread. If the program has freed the message
//             and a tensor still lives, it marks the cell held: nobody knows when it will be free.
//   sender    with no free cell, or no place in the ring, queues the message, and sets `starved`. A receiver that makes
//             room wakes a starved sender, which goes on with its queue when it sends or blocks.
//
// Shared words, who writes them, and what a write publishes to which read. A write is a release and a read an acquire,
// all sequentially consistent but for what is called relaxed.
//   sent      sender    the entry, the message and the cell's state; to Inbox::arrived()
//   taken     receiver  that it has copied the entry, whose place is free; to Outbox::copy()
//   state     sender    free -> used. Relaxed: `sent` publishes it
//             receiver  used -> held; to Cells::find(), which counts on the cell no more
//             receiver  used or held -> free: that nobody uses the message any more, as the reference counts of tensors
//                       order their uses before it; to Cells::find() and Part::idle()
//             So a free cell is the sender's to write and any other the receiver's. Within the receiver the last
//             tensor may free a cell while the program frees the message, and the sender may then use it anew: so
//             "used" has the message's number, and "held" is set by compare and exchange.
//   starved   sender    nothing. Set before it looks for room once more. Unset relaxed: a receiver that still sees it
//                       set wakes a sender that does not sleep, which does no harm
//   retired   sender    nothing: the receiver unmaps the segment sooner. Read relaxed by the sender itself
//   others    sender    plain words: entries are published by `sent`, the rest by PublishedSegment::ready
// Wake-ups are those of host_memory.h. For a message `sent` is (a). For room `taken` or `state` is; the receiver then
// reads `starved`, and of a starved sender `waiting_for`. The sender sets `starved`, and then `waiting_for`, and looks
// for room after each: so as there, either its look sees (a), or the receiver sees what it has set.
//
// Killed processes. An entry is there as a whole or not at all, by `sent`: what a sender published before it died is
// received, and nothing else. Its memory stays as long as tensors of the receiver lie in it. A receiver that dies
// leaves cells used for good: when the sender has waited for a slice it finds the peer dead, and drops what is queued
// for it. From then on the peer is broken. A forked child has copies of the receiver's tensors, and frees nothing.
//
// Why it cannot hang on a program that is proved. The proof lets a send match as soon as its receive is posted, with
// nobody's help, and blocks ranks in WAIT_SEND and WAIT_RECV alone. Here
// 1. post_send never blocks. Where there is no room the message waits in a queue, which is served whenever the rank
//    blocks (and at its next send): so a rank that blocks copies all that has room, as the proof has it.
// 2. There is room once the receive is posted. Say message n waits and its receive is posted: then at most `slots` - 1
//    of the messages before it are posted and not freed, since that is how `slots` was counted in the receiver's
//    program, and every other one has been freed by the program. A cell is free when its last tensor has died. One that
//    the program has freed and a tensor still holds is marked before the receiver sleeps (report_held_cells), and the
//    sender makes another. So one of `slots` + 2 cells is free, or there is memory for one, and the ring has more
//    entries than a step has messages on the channel. (Those of an earlier step are taken by a receiver that is on its
//    way through it.)
// 3. A receiver that makes room wakes a starved sender.
// So every send that would match in the proof is copied here, at the latest when its rank blocks, and the ranks go on.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "common.h"
#include "copy_engine.h"
#include "host_memory.h"
#include "program.h"
#include "transport.h"

namespace fastpipe {

// --- the words in shared memory; see above for who writes them -------------------------------------------------------

// Of one channel. Its entries follow.
struct RingWords {
  alignas(kSharedLine) SharedNumber sent;  // entries ever written
  std::uint64_t num_entries;
  alignas(kSharedLine) SharedNumber taken;  // entries ever read
  alignas(kSharedLine) SharedWord starved;  // the sender has a message for which there was no place
};

// One message.
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

// Free, used for a message of some number, or held.
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

// --- a message where it arrived --------------------------------------------------------------------------------------

// The sender of a cell, which has to know when the cell is free.
struct CellSender {
  std::shared_ptr<SharedMemorySegment> rings;
  const RingWords* ring;
  std::shared_ptr<SharedMemoryPeer> peer;

  // After a change that may make room.
  void wake_if_starved() const {
    if (ring->starved.load() != 0) peer->wakeup().notify_any();
  }
};

// A cell with a message, and what it takes to give it back.
struct ReceivedCell {
  std::shared_ptr<const CellSender> sender;
  std::shared_ptr<SharedMemorySegment> segment;
  CellWords* words = nullptr;  // null: there is none
  std::uint64_t used = 0;      // the state in which it came

  // The program has freed the message: marks the cell if it is not free, as a tensor may still hold it. Once: of this
  // cell nothing is left.
  void report_freed();
};

// While it lives, the sender leaves the cell alone.
class SharedMemoryLease final {
 public:
  SharedMemoryLease() = default;
  explicit SharedMemoryLease(ReceivedCell cell);
  SharedMemoryLease(SharedMemoryLease&& other) noexcept { swap(other); }
  SharedMemoryLease& operator=(SharedMemoryLease&& other) noexcept {
    SharedMemoryLease(std::move(other)).swap(*this);
    return *this;
  }
  // In any thread: the last tensor may die where the user drops it.
  ~SharedMemoryLease();

 private:
  void swap(SharedMemoryLease& other) noexcept {
    std::swap(cell_, other.cell_);
    std::swap(process_, other.process_);
  }

  ReceivedCell cell_;
  pid_t process_ = 0;
};

// --- how a payload lies in shared memory -----------------------------------------------------------------------------

// A message in a cell, aligned to kSharedLine.
struct CellBytes {
  std::byte* data;
  std::size_t size;
  bool announced;  // it begins with its spec
};

// The torch side knows tensors, a stub of the tests numbers.
class Codec {
 public:
  Codec() = default;
  Codec(const Codec&) = delete;
  Codec& operator=(const Codec&) = delete;
  virtual ~Codec() = default;

  // In a cell of shared memory: how many bytes write() fills.
  virtual std::size_t size(const Payload& payload, bool announced) const = 0;
  virtual void write(const Payload& payload, const CellBytes& to) const = 0;
  // Of an announced message.
  virtual std::unique_ptr<Spec> read_spec(const CellBytes& from) const = 0;
  // Makes the message, whose spec is given, the contents of `into`. What uses the cell from then on keeps the lease.
  // Throws Error when the size is not the spec's.
  virtual void adopt(Payload& into, const Spec& spec, const CellBytes& from, SharedMemoryLease lease) const = 0;

  // In a place of a device's memory, to which an engine copies: the size of a place for such a message.
  virtual std::size_t size(const Spec& spec) const = 0;
  virtual void list(const Payload& payload, std::vector<CopyPart>& parts) const = 0;
  // Replaces the pieces by copies, made in the current queue, in memory that what is returned keeps.
  virtual std::shared_ptr<const void> duplicate(std::vector<CopyPart>& parts) const = 0;
  // Makes the message, which is there for the current queue, the contents of `into`. It ends the loan when it is
  // cleared.
  virtual void adopt(Payload& into, const Spec& spec, CopyLoan loan) const = 0;
};

// --- the sender's end of a channel -----------------------------------------------------------------------------------

// The memory in which a channel's messages lie.
class SharedMemoryCells final {
 public:
  // slots: how many of the channel's receives the receiver may have posted and not freed.
  // num_messages: how many a step sends.
  SharedMemoryCells(std::int32_t slots, std::int32_t num_messages) : slots_(slots), num_messages_(num_messages) {}

  // A free cell for the entry's bytes, of which the entry says from now on where it is. There is one, or memory for one
  // is made, unless `slots` and a few more cells are in use that the program will free: then null.
  CellWords* find(RingEntry& entry);
  // Unmaps segments that larger cells have replaced.
  void sweep();

 private:
  struct Part {
    std::shared_ptr<SharedMemorySegment> memory;
    std::uint64_t number;
    std::size_t capacity;  // of a cell
    std::size_t num_cells;

    std::size_t stride() const { return sizeof(CellWords) + capacity; }
    std::size_t offset(std::size_t cell) const { return sizeof(CellSegmentWords) + cell * stride(); }
    CellWords& words(std::size_t cell) const { return *memory->at<CellWords>(offset(cell)); }
    bool retired() const { return memory->at<CellSegmentWords>(0)->retired.load(std::memory_order_relaxed) != 0; }
    bool idle() const;
  };

  std::size_t wanted(std::size_t bytes) const;
  static CellWords* take(const Part& part, std::size_t index, RingEntry& entry);
  void grow(std::size_t bytes, std::size_t num_cells);
  void retire_below(std::size_t capacity);

  std::int32_t slots_;
  std::int32_t num_messages_;
  std::vector<Part> parts_;
  std::uint64_t num_parts_ = 0;  // ever made
};

// One message on its way.
struct SharedMemorySend {
  enum class State { kIdle, kPosted, kCopied };

  State state = State::kIdle;
  std::int32_t channel = 0;
  std::int32_t stage = 0;  // that consumes it
  std::int32_t microbatch = 0;
  const Payload* from = nullptr;  // null: a stand-in
  bool announced = false;
  std::size_t position = 0;  // in the program, for messages
  double completed = 0;
};

class SharedMemoryOutbox final {
 public:
  // ring: zeroed memory for the words and `num_entries` entries, kept by the caller.
  SharedMemoryOutbox(const Codec& codec, std::int32_t channel, RingWords& ring, std::uint64_t num_entries,
                     SharedMemoryCells cells, std::shared_ptr<SharedMemoryPeer> peer);

  // Copies and goes on; where there is no room the message waits for advance(), and `send` stays posted. When it
  // throws, nothing has been sent.
  void post(SharedMemorySend& send);
  // Copies what has room now. True: nothing waits any more. When it throws, a stand-in takes the message's place.
  bool advance();
  bool idle() const { return queue_.empty(); }
  void drop() { queue_.clear(); }
  void sweep() { cells_.sweep(); }
  const SharedMemoryPeer& peer() const { return *peer_; }

 private:
  bool copy(SharedMemorySend& send);
  bool copy_payload(const SharedMemorySend& send, RingEntry& entry);
  void publish(SharedMemorySend& send, const RingEntry& entry);
  void replace_front();

  const Codec& codec_;
  std::int32_t channel_;
  RingWords& ring_;
  RingEntry* entries_;
  SharedMemoryCells cells_;
  std::shared_ptr<SharedMemoryPeer> peer_;
  std::uint64_t sent_ = 0;
  Fifo<SharedMemorySend*> queue_;
};

// --- the receiver's end of a channel ---------------------------------------------------------------------------------

// A message as it arrives.
struct SharedMemoryMessage {
  std::int32_t stage = 0;  // that consumes it
  std::int32_t microbatch = 0;
  bool stand_in = false;
  CellBytes bytes{};
  SharedMemoryLease lease;
  ReceivedCell cell;
};

class SharedMemoryInbox final {
 public:
  SharedMemoryInbox(std::int32_t channel, std::shared_ptr<SharedMemoryPeer> peer, std::size_t program,
                    std::uint64_t fingerprint);

  // Whether a message is there; the rings need not be there yet.
  bool arrived();
  // To be called when one is.
  SharedMemoryMessage take();
  const SharedMemoryPeer& peer() const { return *peer_; }

 private:
  bool open();
  const std::shared_ptr<SharedMemorySegment>& segment_of(const RingEntry& entry);
  void read_cell(const RingEntry& entry, SharedMemoryMessage& message);
  void sweep();

  std::int32_t channel_;
  std::shared_ptr<SharedMemoryPeer> peer_;
  std::size_t program_;
  std::uint64_t fingerprint_;
  std::shared_ptr<const CellSender> sender_;
  RingWords* ring_ = nullptr;
  std::uint64_t taken_ = 0;
  std::map<std::uint64_t, std::shared_ptr<SharedMemorySegment>> segments_;  // by the sender's number
};

// --- the transport ---------------------------------------------------------------------------------------------------

// What a channel needs in a step, by the programs of both its ends.
struct ChannelNeeds {
  std::int32_t slots = 0;  // how many receives are at most posted and not freed
  std::int32_t messages = 0;
};

// Those between two ranks.
std::vector<bool> channels_between_ranks(const std::vector<Channel>& channels);

// Adds what a rank's program tells of the channels on which it receives.
void count_needs(const RankProgram& program, std::vector<ChannelNeeds>& needs);

// The channels of one program, beside the program itself: made on every rank, in the same order.
class SharedMemoryChannels final {
 public:
  // carried: by channel, whether it goes through shared memory; what stays on a rank does not.
  SharedMemoryChannels(std::shared_ptr<SharedMemoryLink> link, std::shared_ptr<const Codec> codec,
                       std::vector<ChannelNeeds> needs, std::vector<bool> carried);

  // Throws ArgumentError for a program that it was not made for.
  void check(const RankProgram& program) const;

  const std::shared_ptr<SharedMemoryLink>& link() const { return link_; }
  const std::shared_ptr<const Codec>& codec() const { return codec_; }
  const ChannelNeeds& needs(std::size_t channel) const { return needs_.at(channel); }
  bool carries(std::size_t channel) const { return carried_.at(channel); }
  std::size_t number() const { return number_; }
  // Differs when the ranks do not mean the same program.
  std::uint64_t fingerprint() const;

 private:
  std::shared_ptr<SharedMemoryLink> link_;
  std::shared_ptr<const Codec> codec_;
  std::vector<ChannelNeeds> needs_;
  std::vector<bool> carried_;
  std::size_t number_;
};

// See the top of this file.
class SharedMemoryTransport final : public Transport {
 public:
  SharedMemoryTransport(const SharedMemoryChannels& source, const RankProgram& program, double timeout_seconds);

  void begin_step(std::int64_t signature, bool announce) override;
  void post_receive(const Transfer& transfer, std::int32_t slot, Payload& into) override;
  bool wait_receive(std::int32_t slot) override;
  void post_send(const Transfer& transfer, std::int32_t send, const Payload& from) override;
  void post_stand_in(const Transfer& transfer, std::int32_t send) override;
  double wait_send(std::int32_t send) override;
  void end_step(bool complete) override;

  // For a rank that is going to block for something else. First it says what it holds on to, ...
  void report_held_cells();
  // ... and copies what has room. True: nothing waits any more; else it has to be served while the rank blocks, until
  // it is over, of which wake_own_rank() is the sign, by another thread. What is thrown is about one message, for which
  // a stand-in was sent.
  bool advance();
  void serve(const std::atomic<bool>& over);
  // The program has freed a slot, and the next message in it may be another transport's.
  void report_held_cell(std::int32_t slot) { receives_[slot].cell.report_freed(); }
  void wake_own_rank() const { link_->wakeup().notify_any(); }

 private:
  struct Receive {
    enum class State { kIdle, kPosted, kArrived };

    State state = State::kIdle;
    Transfer transfer{};
    Payload* into = nullptr;
    bool stand_in = false;
    ReceivedCell cell;
  };

  void make_rings(const SharedMemoryChannels& source);
  // from: null for a stand-in.
  void hand_over(const Transfer& transfer, std::int32_t send, const Payload* from);
  void receive_next(std::int32_t channel);
  bool arrived(SharedMemoryInbox& inbox, std::size_t position);
  void deliver(Receive& receive, SharedMemoryMessage message);
  // Sleeps until `ready`, or throws when the peer is broken.
  void wait(const SharedMemoryPeer& peer, std::uint32_t reason, std::size_t position, FunctionRef<bool()> ready);
  [[noreturn]] void abort_peer(std::int32_t peer, std::size_t position, const std::string& why);
  void drop_peer(std::int32_t peer, const std::string& why);
  // Throws the TransportError for a message that could not be taken: without memory for it this rank has failed.
  [[noreturn]] void refuse_message(const SharedMemoryPeer& peer, std::size_t position,
                                   const std::exception& error) const;
  void drop_all_peers(const std::string& why);
  void check_signals();

  std::shared_ptr<SharedMemoryLink> link_;
  std::shared_ptr<const Codec> codec_;
  RankProgram program_;
  double timeout_seconds_;
  SpecBook specs_;
  std::shared_ptr<SharedMemorySegment> rings_;
  std::vector<std::unique_ptr<SharedMemoryOutbox>> outboxes_;  // by channel; null for those of others
  std::vector<std::unique_ptr<SharedMemoryInbox>> inboxes_;
  std::vector<Fifo<std::int32_t>> queues_;  // by channel: the slots of its posted receives, in order
  std::vector<Receive> receives_;
  std::vector<SharedMemorySend> sends_;
  BrokenPeers broken_;
  std::vector<std::pair<std::int32_t, std::string>> dropped_;  // peers that are broken at the end of the step, and why
};

Connect over_shared_memory(std::shared_ptr<const SharedMemoryChannels> channels);
// In part: `near` says which channels are its, the others go over `far`. See mixed_transport.cpp.
Connect over_both(std::shared_ptr<const SharedMemoryChannels> near, Connect far);

}  // namespace fastpipe
