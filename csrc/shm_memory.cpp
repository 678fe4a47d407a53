#include "shm_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <stdexcept>

namespace hpdl {

namespace {

[[noreturn]] void fail(const std::string& what, int reason) {
    throw std::runtime_error("cannot " + what + ": " + std::strerror(reason));
}

}  // namespace

SharedMemory SharedMemory::create(std::size_t nbytes) {
#if defined(__linux__)
    const int file = memfd_create("hpdl", MFD_CLOEXEC);
    const std::string name = "/proc/" + std::to_string(getpid()) + "/fd/" + std::to_string(file);
#else
    static int created = 0;
    const std::string name = "/hpdl." + std::to_string(getpid()) + "." + std::to_string(created++);
    const int file = shm_open(name.c_str(), O_RDWR | O_CREAT | O_EXCL, 0600);
#endif
    if (file < 0) fail("create shared memory", errno);
    SharedMemory memory(file, nbytes, name, true);
    if (ftruncate(file, static_cast<off_t>(nbytes)) != 0)
        fail("size shared memory to " + std::to_string(nbytes) + " bytes", errno);
    memory.map();
    return memory;
}

SharedMemory SharedMemory::open(const std::string& name, std::size_t nbytes) {
#if defined(__linux__)
    const int file = ::open(name.c_str(), O_RDWR | O_CLOEXEC);
#else
    const int file = shm_open(name.c_str(), O_RDWR, 0);
#endif
    if (file < 0) fail("open the shared memory " + name, errno);
    SharedMemory memory(file, nbytes, name, false);
    struct stat found;
    if (fstat(file, &found) != 0) fail("look at the shared memory " + name, errno);
    // Pages beyond the end could be mapped, but not touched: a SIGBUS.
    if (static_cast<std::size_t>(found.st_size) < nbytes)
        throw std::runtime_error("cannot open the shared memory " + name + ": it has " + std::to_string(found.st_size) +
                                 " bytes, expected " + std::to_string(nbytes));
    memory.map();
    return memory;
}

SharedMemory::SharedMemory(int file, std::size_t nbytes, std::string name, bool created)
    : nbytes_(nbytes), name_(std::move(name)), file_(file), created_(created) {}

SharedMemory::SharedMemory(SharedMemory&& other) noexcept
    : data_(other.data_),
      nbytes_(other.nbytes_),
      name_(std::move(other.name_)),
      file_(other.file_),
      created_(other.created_) {
    other.data_ = nullptr;
    other.file_ = -1;
}

SharedMemory::~SharedMemory() {
    if (data_) munmap(data_, nbytes_);
    seal();
}

void SharedMemory::map() {
    void* data = mmap(nullptr, nbytes_, PROT_READ | PROT_WRITE, MAP_SHARED, file_, 0);
    if (data == MAP_FAILED) fail("map " + std::to_string(nbytes_) + " bytes of shared memory", errno);
    data_ = static_cast<char*>(data);
}

void SharedMemory::require_inside(std::size_t offset, std::size_t nbytes) const {
    if (offset <= nbytes_ && nbytes <= nbytes_ - offset) return;
    throw std::invalid_argument(std::to_string(nbytes) + " bytes from " + std::to_string(offset) +
                                " on reach beyond the end of " + std::to_string(nbytes_) + " bytes of shared memory");
}

void SharedMemory::reserve(std::size_t offset, std::size_t nbytes) {
    require_inside(offset, nbytes);
    if (file_ < 0) throw std::runtime_error("cannot reserve shared memory that is sealed");
#if defined(__linux__)
    if (nbytes > 0 && fallocate(file_, 0, static_cast<off_t>(offset), static_cast<off_t>(nbytes)) != 0)
        fail("reserve " + std::to_string(nbytes) + " bytes of shared memory", errno);
#endif
    std::memset(data_ + offset, 0, nbytes);
}

void SharedMemory::seal() {
    if (file_ < 0) return;
    close(file_);
    file_ = -1;
#if !defined(__linux__)
    if (created_) shm_unlink(name_.c_str());
#endif
}

}  // namespace hpdl
