#include "shared_memory_segment.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <cerrno>
#include <cstring>
#include <string>
#include <utility>

#include "errors.h"

namespace fastpipe {

namespace {

constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW;

[[noreturn]] void fail(const std::string& what) {
  const int number = errno;
  throw Error("shared memory: " + what + " failed (" + std::strerror(number) +
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
  segment->forget_descriptor();  // the mapping is enough
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

}  // namespace fastpipe
