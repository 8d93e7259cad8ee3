#include "sockets.h"

#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>

namespace host_cuda {

namespace {

constexpr int kLookMilliseconds = 20;  // at whether it was aborted

std::pair<sockaddr_un, socklen_t> address_of(const std::string& name) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (name.size() + 1 > sizeof(address.sun_path)) std::abort();
  std::memcpy(address.sun_path + 1, name.data(), name.size());  // the first byte is zero: no file
  return {address, static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size())};
}

bool ready(int connection, short event, const std::atomic<bool>& aborted) {
  pollfd one{connection, event, 0};
  while (!aborted) {
    if (poll(&one, 1, kLookMilliseconds) > 0) return true;
  }
  return false;
}

}  // namespace

int listen_at(const std::string& name) {
  const int listening = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  const auto [address, size] = address_of(name);
  if (bind(listening, reinterpret_cast<const sockaddr*>(&address), size) != 0 || listen(listening, 128) != 0) {
    std::perror("NCCL on the host cannot listen");
    std::abort();
  }
  return listening;
}

int connect_to(const std::string& name, int rank, const std::atomic<bool>& aborted) {
  const auto [address, size] = address_of(name);
  while (!aborted) {
    const int connection = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (connect(connection, reinterpret_cast<const sockaddr*>(&address), size) == 0) {
      write_all(connection, &rank, sizeof(rank), aborted);
      return connection;
    }
    close(connection);
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
  return -1;
}

std::pair<int, int> accept_one(int listening, const std::atomic<bool>& aborted) {
  if (!ready(listening, POLLIN, aborted)) return {-1, -1};
  const int connection = accept4(listening, nullptr, nullptr, SOCK_CLOEXEC);
  int rank = -1;
  if (!read_all(connection, &rank, sizeof(rank), aborted)) return {-1, -1};
  return {rank, connection};
}

bool write_all(int connection, const void* data, std::size_t size, const std::atomic<bool>& aborted) {
  const auto* bytes = static_cast<const std::byte*>(data);
  while (size != 0) {
    if (!ready(connection, POLLOUT, aborted)) return false;
    const ssize_t written = ::send(connection, bytes, size, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (written < 0 && (errno == EAGAIN || errno == EINTR)) continue;
    if (written <= 0) return false;
    bytes += written;
    size -= static_cast<std::size_t>(written);
  }
  return true;
}

bool read_all(int connection, void* data, std::size_t size, const std::atomic<bool>& aborted) {
  auto* bytes = static_cast<std::byte*>(data);
  while (size != 0) {
    if (!ready(connection, POLLIN, aborted)) return false;
    const ssize_t got = ::recv(connection, bytes, size, MSG_DONTWAIT);
    if (got < 0 && (errno == EAGAIN || errno == EINTR)) continue;
    if (got <= 0) return false;
    bytes += got;
    size -= static_cast<std::size_t>(got);
  }
  return true;
}

}  // namespace host_cuda
