// Checks whether code belongs to torch, and whether a table is writable.
#include "memory_map.h"

#if !defined(_WIN32)
#include <dlfcn.h>
#endif

#include <cstdint>
#include <cstdio>
#include <cstring>

namespace amanda {

bool lies_in(const void* address, const char* folder) {
#if defined(_WIN32)
    (void)address, (void)folder;
    return true;
#else
    // Inherited functions (`object.__new__`) share one definition with all other types.
    Dl_info info;
    return dladdr(address, &info) != 0 && info.dli_fname != nullptr &&
           std::strncmp(info.dli_fname, folder, std::strlen(folder)) == 0;
#endif
}

namespace {

bool is_writable(const void* address) {
#if defined(__linux__)
    std::FILE* maps = std::fopen("/proc/self/maps", "r");
    if (maps == nullptr) return true;
    char line[512];
    bool writable = false;
    auto wanted = reinterpret_cast<unsigned long>(address);
    while (std::fgets(line, sizeof line, maps) != nullptr) {
        unsigned long begin, end;
        char rights[5];
        if (std::sscanf(line, "%lx-%lx %4s", &begin, &end, rights) == 3 && begin <= wanted &&
            wanted < end) {
            writable = rights[1] == 'w';
            break;
        }
    }
    std::fclose(maps);
    return writable;
#else
    (void)address;
    return true;
#endif
}

}  // namespace

// Reading the memory map for each of 1,500 neighbours would take too long.
bool is_writable_page(const void* address) {
    static uintptr_t known = 0;
    uintptr_t page = reinterpret_cast<uintptr_t>(address) >> 12;
    if (page == known) return true;
    if (!is_writable(address)) return false;
    known = page;
    return true;
}

}  // namespace amanda
