// One way through the shared-memory transport, without torch and without Python: two processes play ping-pong.
// Reads lines "mode bytes count" (mode: slot, copied, fresh, or without the transport memcpy and memcpy2) and prints
// the seconds of one way: in all, of the copy into the cell, and of the copy out of it. bandwidth.py builds and runs
// it.
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "core/common.h"
#include "core/host_memory.h"
#include "core/shared_memory_transport.h"

namespace fastpipe {

namespace {

class Size final : public Spec {
 public:
  explicit Size(std::size_t bytes) : bytes(bytes) {}
  std::string text() const override { return std::to_string(bytes) + " bytes"; }
  const std::size_t bytes;
};

class Bytes final : public Payload {
 public:
  void clear() noexcept override {
    data = nullptr;
    lease = {};
  }
  bool empty() const override { return data == nullptr; }
  void pack() override {}
  void copy_from(const Payload&) override {}
  std::unique_ptr<Spec> spec() const override { return std::make_unique<Size>(size); }
  bool matches(const Spec& spec) const override { return static_cast<const Size&>(spec).bytes == size; }

  std::byte* data = nullptr;
  std::size_t size = 0;
  SharedMemoryLease lease;
};

class BytesCodec final : public Codec {
 public:
  std::size_t size(const Payload& payload, bool) const override { return static_cast<const Bytes&>(payload).size; }
  void write(const Payload& payload, const CellBytes& to) const override {
    const double start = now_seconds();
    std::memcpy(to.data, static_cast<const Bytes&>(payload).data, to.size);
    seconds += now_seconds() - start;
  }
  std::unique_ptr<Spec> read_spec(const CellBytes& from) const override { return std::make_unique<Size>(from.size); }
  void adopt(Payload& into, const Spec&, const CellBytes& from, SharedMemoryLease lease) const override {
    auto& bytes = static_cast<Bytes&>(into);
    bytes.data = from.data;
    bytes.size = from.size;
    bytes.lease = std::move(lease);
  }

  // Nothing is copied by engines.
  std::size_t size(const Spec&) const override { return 0; }
  void list(const Payload&, std::vector<CopyPart>&) const override {}
  std::shared_ptr<const void> duplicate(std::vector<CopyPart>&) const override { return nullptr; }
  void adopt(Payload&, const Spec&, CopyLoan) const override {}

  mutable double seconds = 0;  // in write()
};

struct Seconds {
  double all;
  double in;   // of these, to copy a message into its cell
  double out;  // and out of it
};

struct Meeting {
  std::atomic<int> present;
  PublishedAddress addresses[2];
};

// One message each way: rank 0 sends first.
RankProgram ping_pong(std::int32_t rank) {
  const std::vector<Instruction> send{{Op::kSend, rank, 0, kNone, kNone, rank, 0},
                                      {Op::kWaitSend, rank, 0, kNone, kNone, rank, 0}};
  const std::vector<Instruction> receive{{Op::kPostRecv, rank, 0, kNone, kNone, 1 - rank, 0},
                                         {Op::kWaitRecv, rank, 0, kNone, kNone, 1 - rank, 0},
                                         {Op::kFree, rank, 0, kNone, kNone, 1 - rank, 0}};
  std::vector<Instruction> all = rank == 0 ? send : receive;
  const std::vector<Instruction>& rest = rank == 0 ? receive : send;
  all.insert(all.end(), rest.begin(), rest.end());
  std::vector<std::int32_t> columns(kNumColumns * all.size());
  for (std::size_t i = 0; i < all.size(); ++i) {
    const std::int32_t fields[] = {static_cast<std::int32_t>(all[i].op),
                                   all[i].stage,
                                   all[i].microbatch,
                                   kNone,
                                   kNone,
                                   all[i].channel,
                                   all[i].slot};
    for (std::size_t row = 0; row < kNumColumns; ++row) columns[row * all.size() + i] = fields[row];
  }
  return {rank, columns.data(), all.size(), {{0, 1, ChannelKind::kActivation}, {1, 0, ChannelKind::kGradient}}};
}

class Player final {
 public:
  Player(std::int32_t rank, Meeting& meeting)
      : rank_(rank), link_(std::make_shared<SharedMemoryLink>(rank, 2, usual_spin(2))) {
    meeting.addresses[rank] = link_->address();
    meeting.present.fetch_add(1);
    while (meeting.present.load() < 2) std::this_thread::yield();
    link_->connect(1 - rank, meeting.addresses[1 - rank]);
    std::vector<ChannelNeeds> needs(2);
    for (std::int32_t r = 0; r < 2; ++r) count_needs(ping_pong(r), needs);
    auto plan = std::make_shared<SharedMemoryChannels>(link_, codec_, needs, std::vector<bool>{true, true});
    transport_ = over_shared_memory(std::move(plan))(ping_pong(rank), 60);
  }

  // Seconds of one way, with what the receiver does with the message; the first rounds warm up.
  Seconds play(const std::string& mode, std::size_t bytes, int count) {
    buffer_.resize(bytes);
    if (from_.size() < bytes) from_.assign(bytes, std::byte{1});
    sent_.data = from_.data();
    sent_.size = bytes;
    double start = 0;
    for (int i = -3; i < count; ++i) {
      if (i == 0) {
        start = now_seconds();
        codec_->seconds = copied_out_ = 0;
      }
      transport_->begin_step(static_cast<std::int64_t>(bytes), known_.emplace(bytes, true).second);
      if (rank_ == 0) send();
      receive(mode);
      if (rank_ == 1) send();
      transport_->end_step(true);
    }
    return {(now_seconds() - start) / count / 2, codec_->seconds / count, copied_out_ / count};
  }

  // Between so many pairs of warm buffers in turn. Two pairs are as much memory as ping and pong use.
  double copy(std::size_t bytes, int count, std::size_t pairs) {
    from_.resize(std::max(from_.size(), bytes * pairs));
    buffer_.resize(std::max(buffer_.size(), bytes * pairs));
    double start = 0;
    for (int i = -static_cast<int>(pairs); i < count; ++i) {
      if (i == 0) start = now_seconds();
      const std::size_t at = bytes * (static_cast<std::size_t>(i + 2) % pairs);
      std::memcpy(buffer_.data() + at, from_.data() + at, bytes);
      asm volatile("" : : "r"(buffer_.data()) : "memory");
    }
    return (now_seconds() - start) / count;
  }

 private:
  Transfer transfer(bool sends) const {
    const std::size_t position = rank_ == 0 ? (sends ? 0 : 2) : (sends ? 3 : 0);
    return {position, sends ? rank_ : 1 - rank_, rank_, 0};
  }

  void send() {
    transport_->post_send(transfer(true), 0, sent_);
    transport_->wait_send(0);
  }

  void receive(const std::string& mode) {
    transport_->post_receive(transfer(false), 0, received_);
    transport_->wait_receive(0);
    const double start = now_seconds();
    if (mode == "copied") std::memcpy(buffer_.data(), received_.data, received_.size);
    if (mode == "fresh") {
      const std::unique_ptr<std::byte[]> fresh(new std::byte[received_.size]);
      std::memcpy(fresh.get(), received_.data, received_.size);
      asm volatile("" : : "r"(fresh.get()) : "memory");
    }
    copied_out_ += now_seconds() - start;
    received_.clear();
  }

  std::int32_t rank_;
  std::shared_ptr<SharedMemoryLink> link_;
  std::shared_ptr<BytesCodec> codec_ = std::make_shared<BytesCodec>();
  std::unique_ptr<Transport> transport_;
  std::map<std::size_t, bool> known_;
  std::vector<std::byte> from_;
  std::vector<std::byte> buffer_;
  Bytes sent_;
  Bytes received_;
  double copied_out_ = 0;
};

struct Order {
  char mode[16];
  std::size_t bytes;
  int count;
};

void follow(Meeting& meeting, int orders) {
  Player player(1, meeting);
  Order order{};
  while (::read(orders, &order, sizeof(order)) == sizeof(order)) player.play(order.mode, order.bytes, order.count);
}

void lead(Meeting& meeting, int orders) {
  Player player(0, meeting);
  Order order{};
  while (std::scanf("%15s %zu %d", order.mode, &order.bytes, &order.count) == 3) {
    Seconds seconds{};
    if (std::strncmp(order.mode, "memcpy", 6) == 0) {
      seconds.all = player.copy(order.bytes, order.count, std::strcmp(order.mode, "memcpy2") == 0 ? 2 : 1);
    } else {
      if (::write(orders, &order, sizeof(order)) != sizeof(order)) return;
      seconds = player.play(order.mode, order.bytes, order.count);
    }
    std::printf("%.9f %.9f %.9f\n", seconds.all, seconds.in, seconds.out);
    std::fflush(stdout);
  }
}

}  // namespace

}  // namespace fastpipe

int main() {
  using namespace fastpipe;
  const auto memory = SharedMemorySegment::make(sizeof(Meeting));
  int orders[2];
  if (::pipe(orders) != 0) return 1;
  const pid_t child = ::fork();
  if (child == 0) {
    ::close(orders[1]);
    follow(*memory->at<Meeting>(0), orders[0]);
    std::_Exit(0);
  }
  ::close(orders[0]);
  lead(*memory->at<Meeting>(0), orders[1]);
  ::close(orders[1]);
  ::waitpid(child, nullptr, 0);
  return 0;
}
