//! iommufd address spaces (`include/uapi/linux/iommufd.h`): ioctls with a number and a structure
//! that begins with its own length. A function is bound by its own device node and VFIO ioctls.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};

use crate::vfio_ioctl::{self, IoctlArgument, arguments};

/// I/O address space in a context of its own: attached functions can access what is mapped there.
#[derive(Debug)]
pub(crate) struct Ioas {
    context: File,
    id: u32,
}

/// `_IO(';', 0x80 + n)`.
const fn ioctl_number(n: u32) -> u32 {
    ((b';' as u32) << 8) | (0x80 + n)
}

const IOAS_ALLOC: u32 = ioctl_number(1);
const IOAS_IOVA_RANGES: u32 = ioctl_number(4);
const IOAS_MAP: u32 = ioctl_number(5);
const IOAS_UNMAP: u32 = ioctl_number(6);

const MAP_FIXED: u32 = 1;
const MAP_WRITEABLE: u32 = 1 << 1;
const MAP_READABLE: u32 = 1 << 2;

#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
struct IoasAlloc {
    size: u32,
    flags: u32,
    id: u32,
}

#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
struct IoasMap {
    size: u32,
    flags: u32,
    id: u32,
    reserved: u32,
    address: u64,
    length: u64,
    iova: u64,
}

#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
struct IoasUnmap {
    size: u32,
    id: u32,
    iova: u64,
    length: u64,
}

#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
struct IoasRanges {
    size: u32,
    id: u32,
    count: u32,
    reserved: u32,
    at: u64,
    alignment: u64,
}

/// `VFIO_DEVICE_BIND_IOMMUFD`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
struct BindIommufd {
    argsz: u32,
    flags: u32,
    iommufd: i32,
    id: u32,
}

/// `VFIO_DEVICE_ATTACH_IOMMUFD_PT`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
struct AttachIoas {
    argsz: u32,
    flags: u32,
    id: u32,
}

const _: () = assert!(size_of::<IoasAlloc>() == 12);
const _: () = assert!(size_of::<IoasMap>() == 40);
const _: () = assert!(size_of::<IoasUnmap>() == 24);
const _: () = assert!(size_of::<IoasRanges>() == 32);
const _: () = assert!(size_of::<BindIommufd>() == 16);
const _: () = assert!(size_of::<AttachIoas>() == 12);

arguments!(IoasAlloc IoasMap IoasUnmap IoasRanges BindIommufd AttachIoas);

impl Ioas {
    /// Creates an empty address space.
    pub(crate) fn new(context: File) -> io::Result<Self> {
        let mut alloc = IoasAlloc { size: IoasAlloc::BYTES, ..IoasAlloc::default() };
        vfio_ioctl::ioctl_with(context.as_fd(), IOAS_ALLOC, &mut alloc)?;
        Ok(Self { context, id: alloc.id })
    }

    /// Binds a function, by its device node, to the context. It is exclusively owned while the node
    /// is open.
    pub(crate) fn bind_function(&self, device: BorrowedFd<'_>) -> io::Result<()> {
        let iommufd = self.context.as_raw_fd();
        let mut bind = BindIommufd { argsz: BindIommufd::BYTES, iommufd, ..BindIommufd::default() };
        vfio_ioctl::ioctl_with(device, vfio_ioctl::DEVICE_BIND_IOMMUFD, &mut bind).map(drop)
    }

    /// Attaches a bound function to the address space.
    pub(crate) fn attach_function(&self, device: BorrowedFd<'_>) -> io::Result<()> {
        let mut attach = AttachIoas { argsz: AttachIoas::BYTES, flags: 0, id: self.id };
        vfio_ioctl::ioctl_with(device, vfio_ioctl::DEVICE_ATTACH_IOMMUFD_PT, &mut attach).map(drop)
    }

    /// Maps memory of this process, which must stay mapped here until it is unmapped there.
    pub(crate) fn map_memory(&self, address: u64, iova: u64, length: u64) -> io::Result<()> {
        let flags = MAP_FIXED | MAP_WRITEABLE | MAP_READABLE;
        let (size, id, reserved) = (IoasMap::BYTES, self.id, 0);
        let mut map = IoasMap { size, flags, id, reserved, address, length, iova };
        vfio_ioctl::ioctl_with(self.context.as_fd(), IOAS_MAP, &mut map).map(drop)
    }

    /// Unmaps memory; returns its size.
    pub(crate) fn unmap_memory(&self, iova: u64, length: u64) -> io::Result<u64> {
        let mut unmap = IoasUnmap { size: IoasUnmap::BYTES, id: self.id, iova, length };
        vfio_ioctl::ioctl_with(self.context.as_fd(), IOAS_UNMAP, &mut unmap)?;
        Ok(unmap.length)
    }

    /// IOVA ranges common to the IOMMUs of all attached functions, each by its first and last
    /// address.
    pub(crate) fn iova_ranges(&self) -> io::Result<Vec<(u64, u64)>> {
        let mut found = vec![[0_u64; 2]; 64];
        loop {
            let count = u32::try_from(found.len()).unwrap_or(u32::MAX);
            let mut ranges = IoasRanges {
                size: IoasRanges::BYTES,
                id: self.id,
                count,
                at: found.as_mut_ptr() as u64,
                ..IoasRanges::default()
            };
            // The kernel writes at most `count` pairs of words, which is all of `found`.
            let reported =
                vfio_ioctl::ioctl_with(self.context.as_fd(), IOAS_IOVA_RANGES, &mut ranges);
            let len = ranges.count as usize;
            match reported {
                Ok(_) => {
                    found.truncate(len);
                    return Ok(found.into_iter().map(|[first, last]| (first, last)).collect());
                }
                // The kernel returns the number that would have been needed.
                Err(error) if error.raw_os_error() == Some(libc::EMSGSIZE) && len > found.len() => {
                    found = vec![[0; 2]; len];
                }
                Err(error) => return Err(error),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn iommufd_ioctl_numbers_match_the_kernel_header() {
        assert_eq!(IOAS_ALLOC, 0x3b81);
        assert_eq!(IOAS_IOVA_RANGES, 0x3b84);
        assert_eq!(IOAS_UNMAP, 0x3b86);
        assert_eq!(vfio_ioctl::DEVICE_BIND_IOMMUFD, 0x3b76);
        assert_eq!(vfio_ioctl::DEVICE_ATTACH_IOMMUFD_PT, 0x3b77);
    }

    #[test]
    fn file_that_is_no_iommufd_has_no_address_space() {
        let refused = Ioas::new(tempfile::tempfile().unwrap()).unwrap_err();
        assert_eq!(refused.raw_os_error(), Some(libc::ENOTTY), "{refused}");
    }
}
