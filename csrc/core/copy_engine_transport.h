// Transport between processes of one host by the copy engines of their devices: streams wait for streams of other
// processes, and no host takes part.
//
// A rank has one segment of the host's memory with the words of every channel on which it may receive. Places for the
// messages are the receiver's memory on its device; all programs use the same, which grow as messages do.
#pragma once

#include <array>
#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "common.h"
#include "copy_engine.h"
#include "host_memory.h"
#include "program.h"
#include "shared_memory_transport.h"
#include "transport.h"

namespace fastpipe {

// What the two ends of a channel share in the host's memory.
struct CopyWords {
  // Incremented by the devices, message by message; the hosts read them, and set them far ahead when they abort.
  alignas(kSharedLine) SharedWord granted;  // by the receiver: the message's place may be written
  alignas(kSharedLine) SharedWord arrived;  // by the sender: the message is there

  // The receiver's host.
  alignas(kSharedLine) SharedNumber num_places;
  SharedNumber place_bytes;  // of every place; written last
  CopyTicket ticket;
  SharedWord refused;  // it could not get as much memory as the step needs

  // The sender's host.
  alignas(kSharedLine) SharedNumber stand_ins;  // the number of a step's first stand-in, from 1
  SharedWord holding;                           // it has the places open

  // Either host: it has aborted or is done, so nobody need wait for more until the time is over.
  alignas(kSharedLine) SharedWord aborted;
};

// Sees to it that no stream waits for good: a thread that looks at the flags which streams wait for, and never calls
// the device.
class CopyWatchdog final {
 public:
  // What one queue waits for, again and again, of one peer.
  class Line final {
   public:
    Line(SharedWord& flag, SharedWord& aborted, std::shared_ptr<SharedMemoryPeer> peer)
        : flag_(flag), aborted_(aborted), peer_(std::move(peer)) {}
    // By the rank's thread, before the queue gets the wait.
    void expect(std::uint32_t value) { expected_.store(value, std::memory_order_relaxed); }

   private:
    friend class CopyWatchdog;
    bool waits() const;

    SharedWord& flag_;
    SharedWord& aborted_;
    const std::shared_ptr<SharedMemoryPeer> peer_;
    std::atomic<std::uint32_t> expected_{0};
    // The watchdog's own.
    std::uint32_t seen_ = 0;
    Clock::time_point since_{};  // of the last progress; zero: it waits for nothing
    Clock::time_point dead_{};   // the first look at which the peer was dead; zero: it lives, as far as is known
  };

  // aborted_by: this rank's word in LinkWords, which must outlive the watchdog.
  CopyWatchdog(std::int32_t rank, double timeout_seconds, SharedWord& aborted_by);
  CopyWatchdog(const CopyWatchdog&) = delete;
  CopyWatchdog& operator=(const CopyWatchdog&) = delete;
  // In a forked child there is no thread, and nothing is done.
  ~CopyWatchdog();

  // The memory of the flags must outlive the watchdog.
  Line& add(SharedWord& flag, SharedWord& aborted, std::shared_ptr<SharedMemoryPeer> peer);
  // Whether any queue waits for a peer. A released one does not.
  bool waiting();
  // From any thread: releases what waits for the peer, now and from now on. All others see that, and that it is because
  // of `blamed`.
  void abort(std::int32_t peer, const std::string& why, std::int32_t blamed);
  bool broken(std::int32_t peer) const;
  bool any_broken() const { return any_broken_.load(); }
  // As they are now.
  BrokenPeers broken_peers() const;

 private:
  void work();
  void look(Line& line, Clock::time_point now);
  void release();
  void abort_locked(std::int32_t peer, const std::string& why, std::int32_t blamed);

  const ForkGuard fork_guard_;
  const double timeout_seconds_;
  SharedWord& aborted_by_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Line> lines_;  // which stay where they are
  BrokenPeers broken_;
  std::atomic<bool> any_broken_{false};
  bool ending_ = false;
  std::unique_ptr<std::thread> thread_;
};

// The receiver's end of a channel.
class CopyIncoming final {
 public:
  CopyIncoming(std::shared_ptr<CopyEngine> engine, CopyWords& words, CopyWatchdog::Line& line);
  CopyIncoming(const CopyIncoming&) = delete;
  CopyIncoming& operator=(const CopyIncoming&) = delete;
  ~CopyIncoming() { words_.aborted.store(1); }

  // Before a step: so many places for messages of so many bytes, shown to the sender. Throws Error, which the
  // sender can see, where there is no memory.
  void prepare(std::size_t count, std::size_t bytes);
  void begin_step() { first_ = posted_; }
  // The next message may come into a place as soon as that is unused. Its number.
  std::uint64_t post(std::int32_t place);
  // Makes the current queue, which is that of `stage`, wait for a message. Not active: it is known to be a stand-in.
  CopyLoan take(std::uint64_t message, std::int32_t place, std::int32_t stage);
  // Whether no queue has anything to do with the words any more.
  bool idle() const;
  // Whether something lies in a place.
  bool holds(const std::byte* data) const;
  bool held_by_sender() const { return words_.holding.load() != 0; }

 private:
  bool is_stand_in(std::uint64_t message) const;

  std::shared_ptr<CopyEngine> engine_;
  CopyWords& words_;
  CopyWatchdog::Line& line_;
  std::unique_ptr<CopyQueue> queue_;
  std::unique_ptr<CopyMark> granted_;                         // of the last message that was posted
  std::map<std::int32_t, std::unique_ptr<CopyMark>> waited_;  // by stage, for the last that was taken
  std::vector<std::shared_ptr<CopyPlace>> places_;
  std::vector<std::shared_ptr<CopyMemory>> memories_;  // the last is in use; the sender may have opened the others
  std::size_t place_bytes_ = 0;
  std::uint64_t posted_ = 0;
  std::uint64_t first_ = 0;  // of the step
};

// The sender's end of a channel.
class CopyOutgoing final {
 public:
  CopyOutgoing(std::shared_ptr<CopyEngine> engine, CopyWords& words, CopyWatchdog::Line& line);
  CopyOutgoing(const CopyOutgoing&) = delete;
  CopyOutgoing& operator=(const CopyOutgoing&) = delete;
  ~CopyOutgoing();

  // Before a step: whether the receiver has shown so many places for messages of so many bytes. They are open then.
  // Throws Error where it had no memory for them.
  bool prepare(std::size_t count, std::size_t bytes);
  void begin_step() { first_ = sent_; }
  // Copies the pieces when the place is granted and what the current queue has now is done; `copied` comes after that.
  void send(std::int32_t place, const std::vector<CopyPart>& parts, CopyMark& copied);
  // In place of a message of so many bytes.
  void stand_in(std::int32_t place, std::size_t bytes, CopyMark& copied);
  // Whether all that was sent has been copied.
  bool idle() const { return last_->reached(); }

 private:
  std::byte* begin(std::int32_t place);
  void end(CopyMark& copied);

  std::shared_ptr<CopyEngine> engine_;
  CopyWords& words_;
  CopyWatchdog::Line& line_;
  std::unique_ptr<CopyQueue> queue_;
  std::unique_ptr<CopyMark> made_;
  std::unique_ptr<CopyMark> last_;
  std::vector<std::shared_ptr<CopyMemory>> memories_;  // the last is in use
  std::size_t num_places_ = 0;
  std::size_t place_bytes_ = 0;
  std::uint64_t sent_ = 0;
  std::uint64_t first_ = 0;  // of the step
};

class CopyEngineLink final {
 public:
  // timeout_seconds: how long a stream waits for a peer.
  CopyEngineLink(std::shared_ptr<SharedMemoryLink> host, std::shared_ptr<CopyEngine> engine, double timeout_seconds);
  CopyEngineLink(const CopyEngineLink&) = delete;
  CopyEngineLink& operator=(const CopyEngineLink&) = delete;
  // What was sent arrives, if its receiver takes it; then all is given back. Waits a moment for peers
  // that have not closed what they opened.
  ~CopyEngineLink();

  const std::shared_ptr<SharedMemoryLink>& host() const { return host_; }
  const std::shared_ptr<CopyEngine>& engine() const { return engine_; }
  CopyWatchdog& watchdog() { return watchdog_; }
  const CopyWatchdog& watchdog() const { return watchdog_; }
  double timeout_seconds() const { return timeout_seconds_; }

  // This rank's end of a channel, made at its first use.
  CopyIncoming& incoming(const Channel& channel);
  // Null as long as the receiver has not shown its words.
  CopyOutgoing* outgoing(const Channel& channel);
  // Whether something lies where messages arrive.
  bool lies_in_place(const std::byte* data) const;

 private:
  // What a receiver shares with this rank, which sends to it.
  struct Shown {
    std::shared_ptr<SharedMemorySegment> segment;
    std::shared_ptr<void> exposed;
  };
  using Key = std::pair<std::int32_t, ChannelKind>;  // a peer, and what it sends or is sent

  static CopyWords& words_in(const SharedMemorySegment& segment, std::int32_t source, ChannelKind kind);
  void finish();
  bool busy() const noexcept;
  bool held() const;

  const ForkGuard fork_guard_;
  std::shared_ptr<SharedMemoryLink> host_;
  std::shared_ptr<CopyEngine> engine_;
  double timeout_seconds_;
  // In this order: the watchdog releases the queues when they end, and looks into the segments.
  std::shared_ptr<SharedMemorySegment> segment_;
  std::shared_ptr<void> exposed_;
  std::map<std::int32_t, Shown> shown_;  // by peer
  CopyWatchdog watchdog_;
  std::map<Key, std::unique_ptr<CopyIncoming>> incoming_;
  std::map<Key, std::unique_ptr<CopyOutgoing>> outgoing_;
};

// Flags in the host's memory: a queue waits for one that the host sets, and writes one that the host reads. Nothing, or
// what did not work; then the engine must not be used.
std::optional<std::string> obstacle_to_flags(CopyEngine& engine, double timeout_seconds);

// Where the messages of one channel go: every message of a step has a place in its receiver's memory, known to both
// ends from the receiver's program.
struct CopyPlaces {
  std::vector<std::int32_t> of_message;  // by the message's number in the step
  std::int32_t count = 0;
};

// Adds those of the channels on which a rank receives: a place for each slot that the channel ever fills.
void add_places(const RankProgram& program, std::vector<CopyPlaces>& places);

// Why it cannot hang on a program that is proved. Read "the rank" as its streams, which follow its program, and
// "blocks" as a wait in a stream.
// 1. A step that announces goes through shared memory as a whole; see SharedMemoryTransport.
// 2. In any other step a receive is granted behind the end of its place's last use, which is the program's FREE of that
//    slot, before the POST_RECV, or an earlier step's; and behind the receives of its channel before it. Each channel
//    has a queue for that, so a grant waits for nothing that the proof does not have before the POST_RECV.
// 3. A message is copied behind what made it, behind the messages of its channel before it, and behind its grant. Each
//    channel has a queue for that. So it is copied where the proof lets its send match.
// 4. The rank's own streams wait in WAIT_RECV for the copy, and in WAIT_SEND for the copy, as in the proof.
// 5. At the beginning of a step a host waits for places that other hosts show at the beginning of theirs, before they
//    wait for anything.
// What streams share beside that, a queue of the hardware say, is the engine's care.
class CopyEngineTransport final : public Transport {
 public:
  CopyEngineTransport(std::shared_ptr<CopyEngineLink> link, const SharedMemoryChannels& announced,
                      std::vector<CopyPlaces> places, const RankProgram& program, double timeout_seconds);

  void begin_step(std::int64_t signature, bool announce) override;
  void post_receive(const Transfer& transfer, std::int32_t slot, Payload& into) override;
  bool wait_receive(std::int32_t slot) override;
  void post_send(const Transfer& transfer, std::int32_t send, const Payload& from) override;
  void post_stand_in(const Transfer& transfer, std::int32_t send) override;
  double wait_send(std::int32_t send) override;
  void end_step(bool complete) override;
  void check() const override;

 private:
  struct Receive {
    bool posted = false;
    Transfer transfer{};
    std::uint64_t message = 0;
    std::int32_t place = 0;
    Payload* into = nullptr;
  };
  struct Send {
    bool posted = false;
    std::int32_t channel = 0;
    std::unique_ptr<CopyMark> copied;
    std::shared_ptr<const void> kept;  // what was duplicated for it
  };

  void make_room(std::int64_t signature);
  std::vector<std::size_t> count_bytes() const;
  void wait_for_room(std::size_t channel, std::size_t bytes);
  // Of the next message of a step.
  std::int32_t next_place(std::int32_t channel) { return places_[channel].of_message.at(num_messages_[channel]++); }
  void wait_for_current(CopyMark& mark);
  template <typename Body>
  void hand_over(const Transfer& transfer, std::int32_t send, const Body& body);
  // False: the peer of a channel is broken, there is nothing to do.
  bool usable(std::int32_t channel);
  // In a step, once: it is drained with the others.
  void report_broken();
  [[noreturn]] void abort_peer(std::int32_t peer, const std::string& why);
  [[noreturn]] void fail() const;

  std::shared_ptr<CopyEngineLink> link_;
  std::shared_ptr<const Codec> codec_;
  RankProgram program_;
  std::vector<CopyPlaces> places_;  // by channel
  double timeout_seconds_;
  SpecBook specs_;
  SharedMemoryTransport announced_;
  bool announcing_ = false;
  std::int64_t signature_ = 0;
  std::set<std::int64_t> prepared_;        // the signatures for which there is room
  bool reported_ = false;                  // in a step that a peer is broken; the rank's thread alone
  std::vector<CopyIncoming*> incoming_;    // by channel; the link's
  std::vector<CopyOutgoing*> outgoing_;    // from the first known step on
  std::vector<std::size_t> num_messages_;  // by channel, so far in the step
  std::vector<Receive> receives_;          // by slot
  std::vector<Send> sends_;
  std::vector<CopyPart> parts_;
};

// announced: how the messages of a step go that announces them; it carries every channel between ranks.
Connect over_copy_engines(std::shared_ptr<CopyEngineLink> link, std::shared_ptr<const SharedMemoryChannels> announced,
                          std::vector<CopyPlaces> places);

}  // namespace fastpipe
