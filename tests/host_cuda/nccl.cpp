// NCCL among processes of one host, over sockets. It is as strict as NCCL may be: a message is sent when it has been
// received; what is between ncclGroupStart and ncclGroupEnd begins and ends together, and moves between two ranks in
// rounds; the operations of a communicator follow one another, whatever stream they are in; and the first message
// between two ranks makes the host wait until the other one has come to it, too.
#include <cuda_runtime_api.h>
#include <nccl.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "sockets.h"
#include "streams.h"
#include "sums.h"

namespace host_cuda {

namespace {

// Between two ranks, one way.
struct Direction {
  int peer;
  bool sends;
  bool operator<(const Direction& other) const { return std::pair(peer, sends) < std::pair(other.peer, other.sends); }
};

}  // namespace

// A communicator. All is by way of rank 0 but messages, which have a connection for each two ranks and direction.
class Communicator {
 public:
  Communicator(std::string name, int rank, int size) : name_(std::move(name)), rank_(rank), size_(size) {
    listening_ = listen_at(address(rank));
    if (rank_ != 0) {
      roots_[0] = connect_to(address(0), rank_, aborted_);
      expect(roots_[0]);  // all are there
      return;
    }
    while (static_cast<int>(roots_.size()) < size_ - 1) {
      const auto [peer, connection] = accept_one(listening_, aborted_);
      if (connection < 0) return;
      roots_[peer] = connection;
    }
    for (const auto& [peer, connection] : roots_) say(connection);
  }
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;
  ~Communicator() {
    for (const auto& [peer, connection] : roots_) close(connection);
    for (const auto& [direction, connection] : connections_) close(connection);
    for (const auto& [peer, connection] : early_) close(connection);
    close(listening_);
  }

  int rank() const { return rank_; }
  int size() const { return size_; }
  const std::string& name() const { return name_; }
  void abort() { aborted_ = true; }
  bool lost() const { return lost_; }
  int next_split() { return splits_++; }

  // By the host, and blocking it, the first time that messages are to go these ways: those of a group at once.
  void prepare(const std::set<Direction>& directions) {
    std::vector<int> new_sends;
    for (const auto& [peer, sends] : directions) {
      if (!sends || connections_.count({peer, true}) != 0) continue;
      connections_[{peer, true}] = connect_to(address(peer), rank_, aborted_);
      new_sends.push_back(peer);
    }
    for (const auto& [peer, sends] : directions) {
      if (!sends && connections_.count({peer, false}) == 0) open(peer);
    }
    for (const int peer : new_sends) expect(connections_[{peer, true}]);
  }

  void send(int peer, const void* data, std::size_t size) {
    if (aborted_) return;  // maybe before it was connected
    const int connection = connections_.at({peer, true});
    write(connection, &size, sizeof(size));
    write(connection, data, size);
    expect(connection);
  }

  void receive(int peer, void* data, std::size_t size) {
    if (aborted_) return;  // maybe before it was connected
    const int connection = connections_.at({peer, false});
    std::size_t sent = 0;
    read(connection, &sent, sizeof(sent));
    if (aborted_) return;
    if (sent != size) {
      std::fprintf(stderr, "A message of %zu bytes was received as one of %zu\n", sent, size);
      std::abort();
    }
    read(connection, data, size);
    say(connection);
  }

  // What every rank has, and what it gets of all that: by rank 0.
  using Share = std::vector<std::byte>;
  Share exchange(const Share& own, const std::function<Share(const std::vector<Share>&, int)>& share) {
    if (rank_ != 0) {
      put(roots_[0], own);
      return take(roots_[0]);
    }
    std::vector<Share> all(static_cast<std::size_t>(size_));
    all[0] = own;
    for (const auto& [peer, connection] : roots_) all[static_cast<std::size_t>(peer)] = take(connection);
    if (aborted_) return {};
    for (const auto& [peer, connection] : roots_) put(connection, share(all, peer));
    return share(all, 0);
  }

  // In the stream, behind all that the communicator has been given before.
  cudaError_t then(cudaStream_t stream, Work work) {
    cudaStreamCaptureStatus captured = cudaStreamCaptureStatusNone;
    cudaStreamIsCapturing(stream, &captured);
    if (captured != cudaStreamCaptureStatusNone) return host_cuda::put(stream, std::move(work));
    auto before = std::exchange(last_, std::make_shared<Mark>());
    return host_cuda::put(stream, [before, work = std::move(work), mark = last_] {
      if (before) before->wait();
      work();
      mark->pass();
    });
  }

 private:
  void open(int peer) {
    while (early_.count(peer) == 0 && !aborted_) {
      const auto [from, connection] = accept_one(listening_, aborted_);
      if (connection >= 0) early_[from] = connection;
    }
    if (aborted_) return;
    connections_[{peer, false}] = early_.extract(peer).mapped();
    say(connections_[{peer, false}]);
  }

  std::string address(int rank) const { return name_ + "/" + std::to_string(rank); }

  // A peer that is gone is noticed, and then waited for until the communicator is aborted, as NCCL's kernels do.
  void give_up() {
    lost_ = true;
    while (!aborted_) std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  void write(int connection, const void* data, std::size_t size) {
    if (!aborted_ && !write_all(connection, data, size, aborted_)) give_up();
  }
  void read(int connection, void* data, std::size_t size) {
    if (!aborted_ && !read_all(connection, data, size, aborted_)) give_up();
  }
  void say(int connection) { write(connection, "!", 1); }
  void expect(int connection) {
    char said = 0;
    read(connection, &said, 1);
  }
  void put(int connection, const Share& share) {
    const std::size_t size = share.size();
    write(connection, &size, sizeof(size));
    write(connection, share.data(), size);
  }
  Share take(int connection) {
    std::size_t size = 0;
    read(connection, &size, sizeof(size));
    Share share(size);
    read(connection, share.data(), size);
    return share;
  }

  const std::string name_;
  const int rank_, size_;
  int listening_ = -1;
  int splits_ = 0;
  std::atomic<bool> aborted_{false};
  std::atomic<bool> lost_{false};
  std::map<int, int> roots_;  // by peer: rank 0's of all others, theirs of rank 0
  std::map<Direction, int> connections_;
  std::map<int, int> early_;  // that have come and are not expected yet
  std::shared_ptr<Mark> last_;
};

namespace {

using Shared = std::shared_ptr<Communicator>;
using Share = Communicator::Share;

struct Operation {
  Shared communicator;
  cudaStream_t stream;
  int peer;  // of a message
  bool sends;
  bool collective;
  Work work;
  Direction direction() const { return {peer, sends}; }
};

thread_local int depth = 0;
thread_local std::vector<Operation>* pending = nullptr;

Shared& shared(ncclComm_t communicator) {
  return *reinterpret_cast<Shared*>(communicator);
}

// With each peer in rounds: the n-th message that goes out with the n-th that comes in, and a round waits for the one
// before it. Peers are side by side, and so are collectives, which are in order among themselves.
struct Line {
  std::vector<const Operation*> out, in;
};

void run_rounds(const Line& line) {
  for (std::size_t round = 0; round < std::max(line.out.size(), line.in.size()); ++round) {
    std::thread receives([&] {
      if (round < line.in.size()) line.in[round]->work();
    });
    if (round < line.out.size()) line.out[round]->work();
    receives.join();
  }
}

void run_together(const std::vector<Operation>& operations) {
  std::map<int, Line> lines;
  for (const Operation& one : operations) {
    Line& line = lines[one.collective ? -1 : one.peer];
    (one.sends ? line.out : line.in).push_back(&one);
  }
  std::vector<std::thread> threads;
  for (const auto& entry : lines) threads.emplace_back(run_rounds, std::cref(entry.second));
  for (std::thread& thread : threads) thread.join();
}

ncclResult_t launch(std::vector<Operation> operations) {
  std::map<Shared, std::set<Direction>> messages;
  for (const Operation& one : operations) {
    if (!one.collective) messages[one.communicator].insert(one.direction());
  }
  std::map<std::pair<Shared, cudaStream_t>, std::vector<Operation>> groups;
  for (Operation& one : operations) groups[{one.communicator, one.stream}].push_back(std::move(one));
  for (auto& [communicator, directions] : messages) communicator->prepare(directions);
  for (auto& [key, group] : groups) {
    if (key.first->then(key.second, [group = group] { run_together(group); }) != cudaSuccess) {
      return ncclUnhandledCudaError;
    }
  }
  return ncclSuccess;
}

ncclResult_t add(Operation operation) {
  if (depth == 0) return launch({std::move(operation)});
  if (pending == nullptr) pending = new std::vector<Operation>;
  pending->push_back(std::move(operation));
  return ncclSuccess;
}

ncclResult_t message(ncclComm_t communicator, cudaStream_t stream, int peer, bool sends, void* data, std::size_t size) {
  const Shared& in = shared(communicator);
  if (peer < 0 || peer >= in->size() || peer == in->rank()) return ncclInvalidArgument;
  return add({in, stream, peer, sends, false,
              [in, peer, sends, data, size] { sends ? in->send(peer, data, size) : in->receive(peer, data, size); }});
}

using Sharing = std::function<Share(const std::vector<Share>&, int)>;

ncclResult_t collective(ncclComm_t communicator, cudaStream_t stream, const void* from, std::size_t size, void* to,
                        const Sharing& share) {
  const Shared& in = shared(communicator);
  return add({in, stream, 0, false, true, [in, from, size, to, share] {
                const auto* bytes = static_cast<const std::byte*>(from);
                const Share got = in->exchange(Share(bytes, bytes + size), share);
                if (!got.empty()) std::memcpy(to, got.data(), got.size());
              }});
}

Share joined(const std::vector<Share>& all) {
  Share whole;
  for (const Share& one : all) whole.insert(whole.end(), one.begin(), one.end());
  return whole;
}

Share part(const Share& whole, int rank, int size) {
  const std::size_t bytes = whole.size() / static_cast<std::size_t>(size);
  const auto begin = whole.begin() + static_cast<std::ptrdiff_t>(bytes * static_cast<std::size_t>(rank));
  return Share(begin, begin + static_cast<std::ptrdiff_t>(bytes));
}

ncclResult_t make(ncclComm_t* made, const std::string& name, int rank, int size) {
  *made = reinterpret_cast<ncclComm_t>(new Shared(std::make_shared<Communicator>(name, rank, size)));
  return ncclSuccess;
}

}  // namespace

}  // namespace host_cuda

using namespace host_cuda;

extern "C" {

ncclResult_t ncclGetVersion(int* version) {
  *version = NCCL_VERSION_CODE;
  return ncclSuccess;
}

const char* ncclGetErrorString(ncclResult_t result) {
  return result == ncclSuccess ? "no error" : "an error of NCCL on the host";
}
const char* ncclGetLastError(ncclComm_t) {
  return "an error of NCCL on the host";
}

ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  std::random_device random;
  *id = {};
  std::snprintf(id->internal, sizeof(id->internal), "host-cuda-%08x%08x%08x", random(), random(), random());
  return ncclSuccess;
}

ncclResult_t ncclCommInitRankConfig(ncclComm_t* made, int size, ncclUniqueId id, int rank, ncclConfig_t*) {
  return make(made, id.internal, rank, size);
}
ncclResult_t ncclCommInitRank(ncclComm_t* made, int size, ncclUniqueId id, int rank) {
  return make(made, id.internal, rank, size);
}

ncclResult_t ncclCommSplit(ncclComm_t communicator, int color, int key, ncclComm_t* made, ncclConfig_t*) {
  struct Wish {
    int color, key, rank;
  };
  const Shared& in = shared(communicator);
  const Wish own{color, key, in->rank()};
  const auto* bytes = reinterpret_cast<const std::byte*>(&own);
  const Share all =
      in->exchange(Share(bytes, bytes + sizeof(own)), [](const auto& shares, int) { return joined(shares); });
  const std::string name = in->name() + "." + std::to_string(in->next_split()) + "." + std::to_string(color);
  *made = nullptr;
  if (color == NCCL_SPLIT_NOCOLOR) return ncclSuccess;
  std::vector<Wish> wishes(all.size() / sizeof(Wish));
  std::memcpy(wishes.data(), all.data(), all.size());
  int rank = 0, size = 0;
  for (const Wish& other : wishes) {
    if (other.color != color) continue;
    ++size;
    if (std::pair(other.key, other.rank) < std::pair(own.key, own.rank)) ++rank;
  }
  return make(made, name, rank, size);
}

// Torch's watchdog aborts once more what it has aborted.
ncclResult_t ncclCommAbort(ncclComm_t communicator) {
  if (communicator == nullptr) return ncclSuccess;
  shared(communicator)->abort();
  delete &shared(communicator);
  return ncclSuccess;
}
ncclResult_t ncclCommFinalize(ncclComm_t) {
  return ncclSuccess;
}
ncclResult_t ncclCommDestroy(ncclComm_t communicator) {
  delete &shared(communicator);
  return ncclSuccess;
}
ncclResult_t ncclCommGetAsyncError(ncclComm_t communicator, ncclResult_t* error) {
  *error = shared(communicator)->lost() ? ncclRemoteError : ncclSuccess;
  return ncclSuccess;
}
ncclResult_t ncclCommCount(ncclComm_t communicator, int* count) {
  *count = shared(communicator)->size();
  return ncclSuccess;
}
ncclResult_t ncclCommUserRank(ncclComm_t communicator, int* rank) {
  *rank = shared(communicator)->rank();
  return ncclSuccess;
}
ncclResult_t ncclCommRegister(ncclComm_t, void*, size_t, void** handle) {
  *handle = nullptr;
  return ncclSuccess;
}
ncclResult_t ncclCommDeregister(ncclComm_t, void*) {
  return ncclSuccess;
}

ncclResult_t ncclGroupStart() {
  ++depth;
  return ncclSuccess;
}
ncclResult_t ncclGroupEnd() {
  if (depth == 0) return ncclInvalidUsage;
  if (--depth != 0 || pending == nullptr) return ncclSuccess;
  return launch(std::exchange(*pending, {}));
}

ncclResult_t ncclSend(const void* data, size_t count, ncclDataType_t type, int peer, ncclComm_t communicator,
                      cudaStream_t stream) {
  return message(communicator, stream, peer, true, const_cast<void*>(data), count * size_of(type));
}
ncclResult_t ncclRecv(void* data, size_t count, ncclDataType_t type, int peer, ncclComm_t communicator,
                      cudaStream_t stream) {
  return message(communicator, stream, peer, false, data, count * size_of(type));
}

ncclResult_t ncclAllReduce(const void* from, void* to, size_t count, ncclDataType_t type, ncclRedOp_t op,
                           ncclComm_t communicator, cudaStream_t stream) {
  return collective(communicator, stream, from, count * size_of(type), to,
                    [type, op](const auto& all, int) { return sum(all, type, op); });
}
ncclResult_t ncclReduce(const void* from, void* to, size_t count, ncclDataType_t type, ncclRedOp_t op, int root,
                        ncclComm_t communicator, cudaStream_t stream) {
  return collective(communicator, stream, from, count * size_of(type), to, [type, op, root](const auto& all, int rank) {
    return rank == root ? sum(all, type, op) : Share();
  });
}
ncclResult_t ncclBroadcast(const void* from, void* to, size_t count, ncclDataType_t type, int root,
                           ncclComm_t communicator, cudaStream_t stream) {
  const bool gives = shared(communicator)->rank() == root;
  return collective(communicator, stream, from, gives ? count * size_of(type) : 0, to,
                    [root](const auto& all, int) { return all[static_cast<std::size_t>(root)]; });
}
ncclResult_t ncclBcast(void* data, size_t count, ncclDataType_t type, int root, ncclComm_t communicator,
                       cudaStream_t stream) {
  return ncclBroadcast(data, data, count, type, root, communicator, stream);
}
ncclResult_t ncclAllGather(const void* from, void* to, size_t count, ncclDataType_t type, ncclComm_t communicator,
                           cudaStream_t stream) {
  return collective(communicator, stream, from, count * size_of(type), to,
                    [](const auto& all, int) { return joined(all); });
}
ncclResult_t ncclReduceScatter(const void* from, void* to, size_t count, ncclDataType_t type, ncclRedOp_t op,
                               ncclComm_t communicator, cudaStream_t stream) {
  const int size = shared(communicator)->size();
  const std::size_t bytes = count * size_of(type) * static_cast<std::size_t>(size);
  return collective(communicator, stream, from, bytes, to,
                    [type, op, size](const auto& all, int rank) { return part(sum(all, type, op), rank, size); });
}

}  // extern "C"
