//! `/dev/ublkcN`: device descriptor shared by the queues.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use tenmil_base::Segment;
use tenmil_dma::RegionTable;

use crate::kernel_files::KernelFiles;

/// Device served by this process. Only one process at a time may have it open.
#[derive(Debug)]
pub struct UblkCharDevice {
    file: OwnedFd,
}

/// Attempts to open a node that udev may create some time after the device.
const TRIES: u32 = 50;
const TRY_AGAIN: Duration = Duration::from_millis(20);

impl UblkCharDevice {
    /// Opens device `number` of `machine`.
    ///
    /// # Errors
    ///
    /// `BUSY` if another process has it open, or the error of the system call.
    pub fn open(machine: &KernelFiles, number: u32) -> Result<Self, Errno> {
        let path = machine.path_of(&format!("dev/ublkc{number}"));
        let open = || rustix::fs::open(&path, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty());
        let mut found = open();
        for _ in 0..TRIES {
            if !matches!(found, Err(Errno::NOENT)) {
                break;
            }
            std::thread::sleep(TRY_AGAIN);
            found = open();
        }
        found.map(|file| Self { file })
    }

    /// Copies the data of a request, from device offset `from` on, into memory.
    pub(super) fn read_request_data(
        &self,
        regions: &RegionTable,
        from: u64,
        into: Segment,
    ) -> Result<(), Errno> {
        let address = regions.host_address(into).map_err(|_| Errno::FAULT)?.as_ptr();
        let descriptor = self.file.as_raw_fd();
        transfer_whole(into.len_bytes as usize, |done| {
            let at = file_offset(from, done)?;
            let (address, left) = (address.wrapping_add(done), into.len_bytes as usize - done);
            // SAFETY: the descriptor is open; `left` bytes from `address` on are inside a region,
            // as `RegionTable::address` has checked for all of `into`, and are mapped while
            // `regions` exists. No reference into a region exists.
            let count = unsafe { libc::pread(descriptor, address.cast(), left, at) };
            usize::try_from(count).map_err(|_| last_os_errno())
        })
    }

    /// Copies memory to the data of a request, from device offset `to` on.
    pub(super) fn write_request_data(
        &self,
        regions: &RegionTable,
        from: Segment,
        to: u64,
    ) -> Result<(), Errno> {
        let address = regions.host_address(from).map_err(|_| Errno::FAULT)?.as_ptr();
        let descriptor = self.file.as_raw_fd();
        transfer_whole(from.len_bytes as usize, |done| {
            let at = file_offset(to, done)?;
            let (address, left) = (address.wrapping_add(done), from.len_bytes as usize - done);
            // SAFETY: as for reading.
            let count = unsafe { libc::pwrite(descriptor, address.cast(), left, at) };
            usize::try_from(count).map_err(|_| last_os_errno())
        })
    }
}

impl AsFd for UblkCharDevice {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

/// Calls `step` with the number of bytes done until it is `len_bytes`; `step` returns its progress.
fn transfer_whole(
    len_bytes: usize,
    mut step: impl FnMut(usize) -> Result<usize, Errno>,
) -> Result<(), Errno> {
    let mut done = 0;
    while done < len_bytes {
        match step(done) {
            // The request is shorter than its descriptor states.
            Ok(0) => return Err(Errno::IO),
            Ok(count) => done += count,
            Err(Errno::INTR) => {}
            Err(errno) => return Err(errno),
        }
    }
    Ok(())
}

fn file_offset(first: u64, done: usize) -> Result<i64, Errno> {
    i64::try_from(first + done as u64).map_err(|_| Errno::INVAL)
}

fn last_os_errno() -> Errno {
    super::errno_of(&std::io::Error::last_os_error())
}

#[cfg(test)]
mod tests {
    use rustix::io::Errno;
    use tenmil_base::{Memory, Segment};
    use tenmil_dma::RegionTable;

    use super::{UblkCharDevice, transfer_whole};
    use crate::kernel_files::KernelFiles;

    #[test]
    fn partial_copy_continues_and_one_without_progress_fails() {
        let mut steps = vec![Ok(3), Err(Errno::INTR), Ok(5)].into_iter();
        let mut seen = Vec::new();
        let copied = transfer_whole(8, |done| {
            seen.push(done);
            steps.next().unwrap()
        });
        assert_eq!((copied, seen), (Ok(()), vec![0, 3, 3]));
        assert_eq!(transfer_whole(8, |_| Ok(0)), Err(Errno::IO));
        assert_eq!(transfer_whole(8, |_| Err(Errno::ACCESS)), Err(Errno::ACCESS));
    }

    #[test]
    fn data_is_copied_to_and_from_its_offset() {
        let root = tempfile::tempdir().unwrap();
        std::fs::create_dir(root.path().join("dev")).unwrap();
        let path = root.path().join("dev/ublkc3");
        std::fs::write(&path, [0; 4096]).unwrap();
        let device = UblkCharDevice::open(&KernelFiles::under_root(root.path()), 3).unwrap();
        let regions = RegionTable::new(4);
        let region = regions.allocate_region(4096).unwrap();
        let part = region.segment().slice(512, 1024).unwrap();
        regions.fill(part, 0x5a).unwrap();
        device.write_request_data(&regions, part, 100).unwrap();
        let file = std::fs::read(&path).unwrap();
        assert!(file[100..1124].iter().all(|byte| *byte == 0x5a));
        assert_eq!((file[99], file[1124]), (0, 0));
        device.read_request_data(&regions, 1123, part.slice(0, 2).unwrap()).unwrap();
        let mut back = [9; 3];
        regions.load(part.slice(0, 3).unwrap(), &mut back).unwrap();
        assert_eq!(back, [0x5a, 0, 0x5a]);
        assert_eq!(
            device.read_request_data(&regions, 4000, part),
            Err(Errno::IO),
            "the file ends before"
        );
        let outside = Segment { offset: 4096, ..part };
        assert_eq!(device.read_request_data(&regions, 0, outside), Err(Errno::FAULT));
        assert_eq!(device.write_request_data(&regions, outside, 0), Err(Errno::FAULT));
    }
}
