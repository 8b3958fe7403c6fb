//! VFIO ioctls (`include/uapi/linux/vfio.h`): a number, and a structure that begins with its own
//! length.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

/// `_IO(';', 100 + n)`: the number contains neither direction nor size.
const fn ioctl_number(n: u32) -> u32 {
    ((b';' as u32) << 8) | (100 + n)
}

pub(crate) const GET_API_VERSION: u32 = ioctl_number(0);
pub(crate) const CHECK_EXTENSION: u32 = ioctl_number(1);
pub(crate) const SET_IOMMU: u32 = ioctl_number(2);
pub(crate) const GROUP_GET_STATUS: u32 = ioctl_number(3);
pub(crate) const GROUP_SET_CONTAINER: u32 = ioctl_number(4);
pub(crate) const GROUP_GET_DEVICE_FD: u32 = ioctl_number(6);
pub(crate) const DEVICE_GET_INFO: u32 = ioctl_number(7);
pub(crate) const DEVICE_GET_REGION_INFO: u32 = ioctl_number(8);
pub(crate) const DEVICE_GET_IRQ_INFO: u32 = ioctl_number(9);
pub(crate) const DEVICE_SET_IRQS: u32 = ioctl_number(10);
pub(crate) const DEVICE_RESET: u32 = ioctl_number(11);
pub(crate) const IOMMU_GET_INFO: u32 = ioctl_number(12);
pub(crate) const IOMMU_MAP_DMA: u32 = ioctl_number(13);
pub(crate) const IOMMU_UNMAP_DMA: u32 = ioctl_number(14);
pub(crate) const DEVICE_BIND_IOMMUFD: u32 = ioctl_number(18);
pub(crate) const DEVICE_ATTACH_IOMMUFD_PT: u32 = ioctl_number(19);

pub(crate) const API_VERSION: i32 = 0;
pub(crate) const TYPE1V2_IOMMU: i32 = 3;
pub(crate) const NOIOMMU_IOMMU: i32 = 8;

/// Flag of the IOMMU information: capabilities follow.
const INFO_CAPABILITIES: u32 = 1 << 1;
/// Capability that lists IOVA ranges (`VFIO_IOMMU_TYPE1_INFO_CAP_IOVA_RANGE`).
const ADDRESSES: u16 = 1;

/// Every function of the group is unbound from its driver.
pub(crate) const GROUP_VIABLE: u32 = 1;

pub(crate) const DEVICE_CAN_RESET: u32 = 1;
pub(crate) const DEVICE_IS_PCI: u32 = 1 << 1;

pub(crate) const REGION_CAN_MAP: u32 = 1 << 2;

pub(crate) const DMA_READ: u32 = 1;
pub(crate) const DMA_WRITE: u32 = 1 << 1;

pub(crate) const IRQ_DATA_NONE: u32 = 1;
pub(crate) const IRQ_DATA_EVENTS: u32 = 1 << 2;
pub(crate) const IRQ_TRIGGER: u32 = 1 << 5;

#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct GroupStatus {
    pub(crate) argsz: u32,
    pub(crate) flags: u32,
}

#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct DeviceInfo {
    pub(crate) argsz: u32,
    pub(crate) flags: u32,
    pub(crate) regions: u32,
    pub(crate) irqs: u32,
    pub(crate) capability: u32,
    pub(crate) pad: u32,
}

#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct RegionInfo {
    pub(crate) argsz: u32,
    pub(crate) flags: u32,
    pub(crate) index: u32,
    pub(crate) capability: u32,
    pub(crate) size: u64,
    pub(crate) offset: u64,
}

#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct IrqInfo {
    pub(crate) argsz: u32,
    pub(crate) flags: u32,
    pub(crate) index: u32,
    pub(crate) count: u32,
}

#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct DmaMap {
    pub(crate) argsz: u32,
    pub(crate) flags: u32,
    pub(crate) address: u64,
    pub(crate) iova: u64,
    pub(crate) size: u64,
}

#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct DmaUnmap {
    pub(crate) argsz: u32,
    pub(crate) flags: u32,
    pub(crate) iova: u64,
    pub(crate) size: u64,
}

const _: () = assert!(size_of::<GroupStatus>() == 8);
const _: () = assert!(size_of::<DeviceInfo>() == 24);
const _: () = assert!(size_of::<RegionInfo>() == 32);
const _: () = assert!(size_of::<IrqInfo>() == 16);
const _: () = assert!(size_of::<DmaMap>() == 32);
const _: () = assert!(size_of::<DmaUnmap>() == 24);

/// Structure passed to an ioctl by address, which begins with its own length.
///
/// # Safety
///
/// An implementing type is `repr(C)`, plain data, and begins with its length as a `u32`.
pub(crate) unsafe trait IoctlArgument: Copy {
    /// Its length.
    const BYTES: u32;
}

macro_rules! arguments {
    ($($name:ident)*) => {$(
        // SAFETY: declared so above.
        unsafe impl $crate::vfio_ioctl::IoctlArgument for $name {
            #[expect(clippy::cast_possible_truncation, reason = "a structure of some bytes")]
            const BYTES: u32 = size_of::<$name>() as u32;
        }
    )*};
}
pub(crate) use arguments;

arguments!(GroupStatus DeviceInfo RegionInfo IrqInfo DmaMap DmaUnmap);

/// Executes an ioctl with a structure that the kernel reads and may write, never beyond the length
/// in it.
///
/// Addresses in the structure are the responsibility of the code that fills it in: memory mapped
/// for a device, [`IommuContext`](crate::IommuContext); a result list, [`Ioas`](crate::iommufd::Ioas).
pub(crate) fn ioctl_with<T: IoctlArgument>(
    file: BorrowedFd<'_>,
    number: u32,
    argument: &mut T,
) -> io::Result<i32> {
    let at: *mut T = argument;
    // SAFETY: `at` is a structure that begins with its own length, and VFIO and iommufd access no
    // more than that.
    let result = unsafe { libc::ioctl(file.as_raw_fd(), request(number), at) };
    check_ioctl_result(result)
}

/// Connects interrupts of a kind, from `start` on, to these eventfds (`None` disconnects); without
/// any element all interrupts of that kind are disabled.
pub(crate) fn set_irq_eventfds(
    device: BorrowedFd<'_>,
    index: u32,
    start: u32,
    events: &[Option<BorrowedFd<'_>>],
) -> io::Result<()> {
    let number = |count: usize| u32::try_from(count).map_err(|_| io::ErrorKind::InvalidInput);
    let data = if events.is_empty() { IRQ_DATA_NONE } else { IRQ_DATA_EVENTS };
    let len_bytes = number(4 * (5 + events.len()))?;
    let mut words = vec![len_bytes, data | IRQ_TRIGGER, index, start, number(events.len())?];
    let raw = |event: &Option<BorrowedFd<'_>>| event.map_or(-1, |event| event.as_raw_fd());
    words.extend(events.iter().map(|event| raw(event).cast_unsigned()));
    // SAFETY: the kernel reads as many bytes as the first word states, which is all of `words`.
    let result =
        unsafe { libc::ioctl(device.as_raw_fd(), request(DEVICE_SET_IRQS), words.as_ptr()) };
    check_ioctl_result(result).map(drop)
}

/// Executes an ioctl with an integer argument.
pub(crate) fn ioctl(file: BorrowedFd<'_>, number: u32, value: i32) -> io::Result<i32> {
    // SAFETY: the ioctls issued through this function take an integer and no address.
    let result =
        unsafe { libc::ioctl(file.as_raw_fd(), request(number), libc::c_long::from(value)) };
    check_ioctl_result(result)
}

/// Executes the ioctl that takes a pointer to a descriptor.
pub(crate) fn set_container(group: BorrowedFd<'_>, container: BorrowedFd<'_>) -> io::Result<i32> {
    let descriptor: libc::c_int = container.as_raw_fd();
    let at: *const libc::c_int = &raw const descriptor;
    // SAFETY: the kernel reads one descriptor there.
    let result = unsafe { libc::ioctl(group.as_raw_fd(), request(GROUP_SET_CONTAINER), at) };
    check_ioctl_result(result)
}

/// Executes the ioctl that takes a name.
pub(crate) fn group_get_device_fd(group: BorrowedFd<'_>, name: &std::ffi::CStr) -> io::Result<i32> {
    // SAFETY: the kernel reads a zero-terminated string there.
    let result =
        unsafe { libc::ioctl(group.as_raw_fd(), request(GROUP_GET_DEVICE_FD), name.as_ptr()) };
    check_ioctl_result(result)
}

/// IOVA ranges of an IOMMU, each by its first and last address; empty if the kernel does not report
/// them.
pub(crate) fn iova_ranges(container: BorrowedFd<'_>) -> io::Result<Vec<(u64, u64)>> {
    let mut words = vec![0_u32; 1024];
    loop {
        let len_bytes = u32::try_from(words.len() * 4).unwrap_or(u32::MAX);
        words[0] = len_bytes;
        let at = words.as_mut_ptr();
        // SAFETY: the kernel reads and writes no more bytes than the first word states, which is
        // all of `words`.
        let result = unsafe { libc::ioctl(container.as_raw_fd(), request(IOMMU_GET_INFO), at) };
        check_ioctl_result(result)?;
        // The kernel returns the length that would have been needed.
        if words[0] <= len_bytes {
            let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_ne_bytes()).collect();
            return Ok(iova_ranges_of_capability(&bytes));
        }
        words = vec![0; (words[0] as usize).div_ceil(4)];
    }
}

/// ```text
///   0      4      8              16               20
///   | argsz| flags| page sizes   | capabilities at |     each: | id : 16 | version : 16 | next at |
///   addresses: | header : 8 | count | – | first, last | first, last | …
/// ```
fn iova_ranges_of_capability(info: &[u8]) -> Vec<(u64, u64)> {
    let word = |at: usize| Some(u32::from_ne_bytes(info.get(at..at + 4)?.try_into().ok()?));
    let long = |at: usize| Some(u64::from_ne_bytes(info.get(at..at + 8)?.try_into().ok()?));
    let has_any = word(4).is_some_and(|flags| flags & INFO_CAPABILITIES != 0);
    let mut at = word(16).filter(|_| has_any).unwrap_or(0) as usize;
    // Bounded, in case the chain is a cycle.
    for _ in 0..info.len() / 8 {
        let Some(id) = info.get(at..at + 2).filter(|_| at > 0) else { break };
        if id == ADDRESSES.to_ne_bytes() {
            let count = word(at + 8).unwrap_or(0) as usize;
            let ranges = (0..count).map_while(|index| {
                let place = at + 16 + index * 16;
                Some((long(place)?, long(place + 8)?))
            });
            return ranges.collect();
        }
        at = word(at + 4).unwrap_or(0) as usize;
    }
    Vec::new()
}

fn check_ioctl_result(result: libc::c_int) -> io::Result<i32> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

/// A request in the type that the C library has for it: unsigned with glibc, signed with musl, whose upper bits the
/// kernel ignores.
const fn request(number: u32) -> libc::Ioctl {
    number as libc::Ioctl
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ioctl_numbers_match_the_kernel_header() {
        assert_eq!(GET_API_VERSION, 0x3b64);
        assert_eq!(DEVICE_RESET, 0x3b6f);
        assert_eq!(IOMMU_GET_INFO, 0x3b70);
        assert_eq!(IOMMU_UNMAP_DMA, 0x3b72);
    }

    #[test]
    fn iova_ranges_are_found_in_the_capability_chain() {
        let mut words = vec![0_u32; 32];
        words[1] = INFO_CAPABILITIES;
        words[4] = 24;
        // Another capability, and the requested one.
        (words[6], words[7]) = (3 | 1 << 16, 40);
        (words[10], words[11], words[12]) = (1 | 1 << 16, 0, 2);
        words[14..22].copy_from_slice(&[0, 0, 0xfedf_ffff, 0, 0xfef0_0000, 0, u32::MAX, 0x7f]);
        let bytes =
            |words: &[u32]| words.iter().flat_map(|word| word.to_ne_bytes()).collect::<Vec<u8>>();
        let expected = [(0, 0xfedf_ffff), (0xfef0_0000, (1 << 39) - 1)];
        assert_eq!(iova_ranges_of_capability(&bytes(&words)), expected);
        assert_eq!(iova_ranges_of_capability(&bytes(&words[..18])), expected[..1], "cut off");
        words[7] = 24;
        assert_eq!(iova_ranges_of_capability(&bytes(&words)), [], "they go round");
        words[1] = 1;
        assert_eq!(iova_ranges_of_capability(&bytes(&words)), [], "there are none");
        assert_eq!(iova_ranges_of_capability(&[]), []);
    }
}
