// Memory that the ranks of one machine share. It never has a name in /dev/shm if the system allows that, so nothing
// is left behind whatever kills a rank, and the small /dev/shm of a container is no limit.
#pragma once

#include <cstddef>
#include <string>

namespace hpdl {

class SharedMemory {
  public:
    // New zeroed memory of `nbytes` > 0. Throws std::runtime_error with the system's reason.
    static SharedMemory create(std::size_t nbytes);
    // The memory that another rank has created. `name` is what its name() says. Throws std::runtime_error if that is
    // not there, or smaller.
    static SharedMemory open(const std::string& name, std::size_t nbytes);

    SharedMemory(SharedMemory&& other) noexcept;
    SharedMemory& operator=(SharedMemory&&) = delete;
    ~SharedMemory();

    // Take the pages of [offset, offset + nbytes) now, on this rank's memory node. Throws std::runtime_error if there
    // are none, instead of a SIGBUS later; std::invalid_argument beyond the end.
    void reserve(std::size_t offset, std::size_t nbytes);
    // Every rank has opened it: nobody can open it any more, and it ends with the last rank.
    void seal();

    char* data() const { return data_; }
    std::size_t nbytes() const { return nbytes_; }
    const std::string& name() const { return name_; }

    // Throw std::invalid_argument unless all of [offset, offset + nbytes) is in the memory.
    void require_inside(std::size_t offset, std::size_t nbytes) const;

  private:
    SharedMemory(int file, std::size_t nbytes, std::string name, bool created);
    void map();

    char* data_ = nullptr;
    std::size_t nbytes_;
    std::string name_;
    int file_;
    bool created_;
};

}  // namespace hpdl
