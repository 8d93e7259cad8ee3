// Connections between processes of one host, by names that leave nothing behind.
#pragma once

#include <atomic>
#include <cstddef>
#include <string>
#include <utility>

namespace host_cuda {

int listen_at(const std::string& name);

// Until there is somebody at the name. Says who knocks.
int connect_to(const std::string& name, int rank, const std::atomic<bool>& aborted);

// Who knocked, and the connection; -1 when aborted.
std::pair<int, int> accept_one(int listening, const std::atomic<bool>& aborted);

// False where the other end is gone, or it was aborted.
bool write_all(int connection, const void* data, std::size_t size, const std::atomic<bool>& aborted);
bool read_all(int connection, void* data, std::size_t size, const std::atomic<bool>& aborted);

}  // namespace host_cuda
