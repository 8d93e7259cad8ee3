#include "host_memory.h"

#include <fcntl.h>
#include <linux/futex.h>
#include <poll.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstring>
#include <ctime>
#include <random>
#include <string>
#include <utility>

#include "common.h"

namespace fastpipe {

namespace {

constexpr std::chrono::microseconds kSpin{4};  // about what a futex costs
// On cores of its own a rank takes nothing from others. A peer then needs no system call to wake it, and an idle core
// of a virtual machine is not halted; beyond this the wait is long anyway.
constexpr std::chrono::microseconds kSpinAlone{200};

int num_cores() {
  cpu_set_t cores;
  CPU_ZERO(&cores);
  return ::sched_getaffinity(0, sizeof(cores), &cores) == 0 ? CPU_COUNT(&cores) : 1;
}

// Between two looks.
void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace

Clock::duration usual_spin(std::int32_t num_sharing) {
  if (num_sharing <= 1) return kSpinAlone;
  return num_sharing < num_cores() ? Clock::duration(kSpin) : Clock::duration::zero();
}

bool comes_true_soon(Clock::duration spin, FunctionRef<bool()> ready) {
  if (ready()) return true;
  if (spin == Clock::duration::zero()) return false;
  const Clock::time_point until = Clock::now() + spin;
  while (Clock::now() < until) {
    if (ready()) return true;
    relax();
  }
  return false;
}

namespace {

constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW;

[[noreturn]] void fail(const std::string& what) {
  const int number = errno;
  throw OutOfMemory("shared memory: " + what + " failed (" + std::strerror(number) +
                    "); free memory or descriptors (ulimit -n), or use transport='process_group'");
}

void require(bool holds, const std::string& path, const char* what) {
  if (!holds) throw Error("shared memory: " + path + " is not " + what + ", so it is not used");
}

void check(int descriptor, std::size_t bytes, const std::string& path) {
  struct stat status{};
  if (::fstat(descriptor, &status) != 0) fail("fstat of " + path);
  const int seals = ::fcntl(descriptor, F_GET_SEALS);
  require(seals >= 0 && (seals & kSeals) == kSeals, path, "sealed memory");
  require(status.st_uid == ::geteuid(), path, "this user's");
  require(static_cast<std::size_t>(status.st_size) == bytes, path, "of the size announced");
}

}  // namespace

std::shared_ptr<SharedMemorySegment> SharedMemorySegment::make(std::size_t bytes) {
  SharedMemoryDescriptor descriptor(::memfd_create("fastpipe", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  const int number = descriptor.number();
  if (number < 0) fail("memfd_create");
  if (::ftruncate(number, static_cast<off_t>(bytes)) != 0) fail("making " + std::to_string(bytes) + " bytes");
  if (::fcntl(number, F_ADD_SEALS, kSeals | F_SEAL_SEAL) != 0) fail("sealing");
  return std::make_shared<SharedMemorySegment>(std::move(descriptor), bytes);
}

std::shared_ptr<SharedMemorySegment> SharedMemorySegment::open(pid_t owner, int descriptor, std::size_t bytes) {
  const std::string path = "/proc/" + std::to_string(owner) + "/fd/" + std::to_string(descriptor);
  SharedMemoryDescriptor opened(::open(path.c_str(), O_RDWR | O_CLOEXEC));
  if (opened.number() < 0) fail("opening " + path);
  check(opened.number(), bytes, path);
  auto segment = std::make_shared<SharedMemorySegment>(std::move(opened), bytes);
  segment->close_descriptor();  // the mapping is enough
  return segment;
}

SharedMemorySegment::SharedMemorySegment(SharedMemoryDescriptor descriptor, std::size_t bytes)
    : descriptor_(std::move(descriptor)), data_(nullptr), size_(bytes) {
  void* const mapped = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor_.number(), 0);
  if (mapped == MAP_FAILED) fail("mapping " + std::to_string(bytes) + " bytes");
  data_ = static_cast<std::byte*>(mapped);
}

SharedMemorySegment::~SharedMemorySegment() {
  ::munmap(data_, size_);
}

namespace {

// Not the PRIVATE kind, which knows one process alone.
long futex(SharedWord& word, int operation, std::uint32_t value, const timespec* timeout) {
  return ::syscall(SYS_futex, reinterpret_cast<std::uint32_t*>(&word), operation, value, timeout, nullptr, 0);
}

}  // namespace

void SharedMemoryWakeup::notify(std::uint32_t reason) {
  if (waiting_for_.load() == reason) wake();
}

void SharedMemoryWakeup::notify_any() {
  if (waiting_for_.load() != kNotWaiting) wake();
}

void SharedMemoryWakeup::wake() {
  if (waiting_for_.exchange(kNotWaiting) == kNotWaiting) return;
  count_.fetch_add(1);
  futex(count_, FUTEX_WAKE, 1, nullptr);
}

SharedMemoryWakeup::Waited SharedMemoryWakeup::wait(std::uint32_t reason, FunctionRef<bool()> ready) {
  constexpr timespec kSlice{0, kSliceMilliseconds * 1000000L};
  // Relaxed: others that still see the reason wake a rank that does not sleep.
  const auto end = [this] { waiting_for_.store(kNotWaiting, std::memory_order_relaxed); };
  const std::uint32_t count = count_.load();
  waiting_for_.store(reason);
  bool is_ready = false;
  try {
    is_ready = ready();
  } catch (...) {
    end();
    throw;
  }
  const bool woken = is_ready || futex(count_, FUTEX_WAIT, count, &kSlice) == 0 || errno != ETIMEDOUT;
  end();
  return is_ready ? Waited::kNot : woken ? Waited::kUntilWoken : Waited::kForSlice;
}

namespace {

SharedMemoryDescriptor open_pidfd(pid_t process) {
  const auto number = static_cast<int>(::syscall(SYS_pidfd_open, process, 0));
  if (number >= 0) return SharedMemoryDescriptor(number);
  throw Error("shared memory: process " + std::to_string(process) + " cannot be watched (" + std::strerror(errno) +
              "); use transport='process_group'");
}

}  // namespace

std::shared_ptr<SharedMemorySegment> make_published(std::size_t bytes, std::uint64_t magic) {
  std::random_device random;
  auto published = SharedMemorySegment::make(bytes);
  auto& words = *published->at<PublishedWords>(0);
  words.magic = magic;
  words.nonce = std::uint64_t{random()} << 32 | random();
  return published;
}

PublishedAddress address_of(const SharedMemorySegment& published) {
  return {::getpid(), published.descriptor(), published.at<PublishedWords>(0)->nonce};
}

SharedMemoryPeer::SharedMemoryPeer(std::int32_t rank, const PublishedAddress& address, std::size_t bytes,
                                   std::uint64_t magic)
    : rank_(rank),
      process_(address.process),
      pidfd_(open_pidfd(address.process)),
      published_(open(address.descriptor, bytes)) {
  const auto& words = this->words<PublishedWords>();
  if (words.magic == magic && words.nonce == address.nonce) return;
  throw Error("shared memory: what rank " + std::to_string(rank) +
              " published cannot be read; run the same version of fastpipe on every rank");
}

bool SharedMemoryPeer::alive() const {
  pollfd descriptor{pidfd_.number(), POLLIN, 0};
  return ::poll(&descriptor, 1, 0) <= 0;
}

std::shared_ptr<SharedMemorySegment> SharedMemoryPeer::open(int descriptor, std::size_t bytes) const {
  auto segment = SharedMemorySegment::open(process_, descriptor, bytes);
  // The number may have been another process's by then, but not if the process still lives.
  if (alive()) return segment;
  throw Error("shared memory: the process of rank " + std::to_string(rank_) + " died");
}

std::shared_ptr<SharedMemorySegment> rings_of(const SharedMemoryPeer& peer, std::size_t program,
                                              std::uint64_t fingerprint) {
  const PublishedSegment& published = peer.words<LinkWords>().programs[program % kNumPrograms];
  const std::uint64_t ready = published.ready.load();
  const auto descriptor = static_cast<int>(ready & 0xffffffff);
  if (ready != ready_value(program, descriptor)) return nullptr;
  if (published.fingerprint != fingerprint) {
    throw Error("shared memory: rank " + std::to_string(peer.rank()) +
                " runs another program; call step and eval_step in the same order on every rank");
  }
  return peer.open(descriptor, published.bytes);
}

std::shared_ptr<SharedMemorySegment> copies_of(const SharedMemoryPeer& peer) {
  const PublishedSegment& published = peer.words<LinkWords>().copies;
  const std::uint64_t ready = published.ready.load();
  return ready == 0 ? nullptr : peer.open(static_cast<int>(ready & 0xffffffff), published.bytes);
}

void SharedMemoryLink::connect(std::int32_t rank, const PublishedAddress& address) {
  peers_.at(rank) = std::make_shared<SharedMemoryPeer>(rank, address, sizeof(LinkWords), LinkWords::kMagic);
}

const std::shared_ptr<SharedMemoryPeer>& SharedMemoryLink::peer(std::int32_t rank) const {
  if (rank >= 0 && rank < static_cast<std::int32_t>(peers_.size()) && peers_[rank]) return peers_[rank];
  throw ArgumentError("rank " + std::to_string(rank_) + " is not connected to rank " + std::to_string(rank) +
                      " by shared memory; connect every rank of the program first");
}

void SharedMemoryLink::lose(std::int32_t rank) {
  std::int32_t nobody = kNobody;
  lost_.compare_exchange_strong(nobody, rank);
  wakeup().notify_any();
}

std::optional<std::int32_t> SharedMemoryLink::lost() const {
  const std::int32_t rank = lost_;
  return rank == kNobody ? std::nullopt : std::optional<std::int32_t>(rank);
}

std::optional<std::pair<std::int32_t, std::int32_t>> SharedMemoryLink::find_abort() const {
  for (const auto& peer : peers_) {
    const std::uint32_t word = peer ? peer->words<LinkWords>().aborted_by.load() : 0;
    if (word != 0) return std::make_pair(peer->rank(), static_cast<std::int32_t>(word) - 1);
  }
  return std::nullopt;
}

void SharedMemoryLink::publish(std::size_t program, const SharedMemorySegment& rings, std::uint64_t fingerprint) {
  PublishedSegment& published = words().programs[program % kNumPrograms];
  published.bytes = rings.size();
  published.fingerprint = fingerprint;
  published.ready.store(ready_value(program, rings.descriptor()));
  for (const auto& peer : peers_) {
    if (peer) peer->wakeup().notify_any();
  }
}

void SharedMemoryLink::publish_copies(const SharedMemorySegment& segment) {
  PublishedSegment& published = words().copies;
  published.bytes = segment.size();
  published.ready.store(ready_value(0, segment.descriptor()));
}

}  // namespace fastpipe
