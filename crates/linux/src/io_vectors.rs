//! Address lists for vectored I/O: the only place where a segment becomes an `iovec`.

use std::os::fd::{AsFd, AsRawFd};

use rustix::io::Errno;
use tenmil_base::{InvalidSegment, Segment};
use tenmil_dma::RegionTable;

/// Addresses and lengths of region memory. Holds a handle to the regions, so the memory stays
/// mapped.
#[derive(Debug)]
pub(crate) struct IoVectors {
    regions: RegionTable,
    list: Vec<libc::iovec>,
    capacity: usize,
    /// Number of leading entries that are done.
    done: usize,
}

// SAFETY: the list holds addresses of region memory, which are valid on every thread; `RegionTable`
// itself is `Send`, and nothing else is tied to a thread.
unsafe impl Send for IoVectors {}

/// Direction of a transfer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TransferDirection {
    FromFile,
    ToFile,
}

/// Advances a list by `count` bytes; its first `done` entries are done. Returns whether anything is
/// left.
pub(crate) fn advance_list(list: &mut [libc::iovec], done: &mut usize, mut count: usize) -> bool {
    while let Some(first) = list.get_mut(*done) {
        if count < first.iov_len {
            first.iov_base = first.iov_base.cast::<u8>().wrapping_add(count).cast();
            first.iov_len -= count;
            return true;
        }
        count -= first.iov_len;
        *done += 1;
    }
    false
}

impl IoVectors {
    /// Creates an empty list of `capacity` entries. Allocates only here.
    pub(crate) fn with_capacity(regions: RegionTable, capacity: usize) -> Self {
        Self { regions, list: Vec::with_capacity(capacity), capacity, done: 0 }
    }

    /// Regions that the segments refer to.
    pub(crate) fn regions(&self) -> &RegionTable {
        &self.regions
    }

    /// Replaces the list. `Ok(false)` if the segments do not fit.
    pub(crate) fn set_all(&mut self, segments: &[Segment]) -> Result<bool, InvalidSegment> {
        Ok(self.set_fitting_segments(segments)? == segments.len())
    }

    /// Replaces the list by as many of `segments` as fit, and returns their number. Adjacent
    /// segments are merged.
    pub(crate) fn set_fitting_segments(
        &mut self,
        segments: &[Segment],
    ) -> Result<usize, InvalidSegment> {
        self.list.clear();
        self.done = 0;
        for (index, segment) in segments.iter().enumerate() {
            let base = self.regions.host_address(*segment)?.as_ptr();
            let len = segment.len_bytes as usize;
            let full = self.list.len() == self.capacity;
            match self.list.last_mut() {
                Some(last) if last.iov_base.cast::<u8>().wrapping_add(last.iov_len) == base => {
                    last.iov_len += len;
                }
                _ if full => return Ok(index),
                _ => self.list.push(libc::iovec { iov_base: base.cast(), iov_len: len }),
            }
        }
        Ok(segments.len())
    }

    /// Remaining entries.
    pub(crate) fn remaining(&self) -> &[libc::iovec] {
        &self.list[self.done..]
    }

    /// Advances by `count` bytes. Returns whether anything is left.
    pub(crate) fn advance_list(&mut self, count: usize) -> bool {
        advance_list(&mut self.list, &mut self.done, count)
    }

    /// Transfers everything, blocking.
    pub(crate) fn transfer_all(
        &mut self,
        file: impl AsFd,
        mut offset: u64,
        direction: TransferDirection,
    ) -> Result<(), Errno> {
        while !self.remaining().is_empty() {
            match self.transfer_some(&file, offset, direction) {
                // No progress and no error: the file ends here, though it was longer when it was
                // opened.
                Ok(0) => return Err(Errno::IO),
                Ok(count) => {
                    offset += count as u64;
                    self.advance_list(count);
                }
                Err(Errno::INTR) => {}
                Err(errno) => return Err(errno),
            }
        }
        Ok(())
    }

    fn transfer_some(
        &self,
        file: impl AsFd,
        offset: u64,
        direction: TransferDirection,
    ) -> Result<usize, Errno> {
        let descriptor = file.as_fd().as_raw_fd();
        let offset = libc::off_t::try_from(offset).map_err(|_| Errno::FBIG)?;
        let list = self.remaining();
        let count = libc::c_int::try_from(list.len()).map_err(|_| Errno::INVAL)?;
        let moved = match direction {
            TransferDirection::FromFile => {
                // SAFETY: `list` has `count` entries, each resolved by `RegionTable`, whose handle
                // keeps the memory mapped; no reference into a region exists; the descriptor is
                // open.
                unsafe { libc::preadv(descriptor, list.as_ptr(), count, offset) }
            }
            TransferDirection::ToFile => {
                // SAFETY: as above; the kernel only reads the memory.
                unsafe { libc::pwritev(descriptor, list.as_ptr(), count, offset) }
            }
        };
        usize::try_from(moved).map_err(|_| last_errno())
    }
}

impl IoVectors {
    /// Receives from a socket into the list. Never blocks.
    pub(crate) fn receive(&mut self, socket: impl AsFd) -> Result<usize, Errno> {
        let mut message = self.message_header();
        // SAFETY: `message` names only the entries of the list, each resolved by `RegionTable`,
        // whose handle keeps the memory mapped; no reference into a region exists; the descriptor
        // is open as long as `socket`.
        let moved = unsafe {
            libc::recvmsg(socket.as_fd().as_raw_fd(), &raw mut message, libc::MSG_DONTWAIT)
        };
        usize::try_from(moved).map_err(|_| last_errno())
    }

    /// Sends the list, as far as the socket has space. Never blocks, and raises no SIGPIPE if the
    /// peer has closed.
    pub(crate) fn send(&mut self, socket: impl AsFd) -> Result<usize, Errno> {
        let message = self.message_header();
        let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
        // SAFETY: as above; the kernel only reads the memory.
        let moved = unsafe { libc::sendmsg(socket.as_fd().as_raw_fd(), &raw const message, flags) };
        usize::try_from(moved).map_err(|_| last_errno())
    }

    /// Message header for the list: no address, no control data.
    fn message_header(&mut self) -> libc::msghdr {
        // SAFETY: all zeroes is a valid `msghdr`: null pointers with lengths of zero.
        let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
        let rest = &mut self.list[self.done..];
        // `as _`: the field is narrower with musl.
        message.msg_iovlen = rest.len() as _;
        message.msg_iov = rest.as_mut_ptr();
        message
    }
}

pub(crate) fn last_errno() -> Errno {
    Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::IO)
}

#[cfg(test)]
mod tests {
    use tenmil_base::{Memory, RegionId, Segment};
    use tenmil_dma::{MemoryBacking, MemoryMapping, RegionTable};

    use super::{IoVectors, TransferDirection};

    fn test_memory() -> (RegionTable, Segment) {
        let regions = RegionTable::new(1);
        let whole =
            regions.add_mapping(MemoryMapping::new(8192, MemoryBacking::Private).unwrap()).unwrap();
        (regions, whole)
    }

    fn lengths(vectors: &IoVectors) -> Vec<usize> {
        vectors.remaining().iter().map(|entry| entry.iov_len).collect()
    }

    #[test]
    fn adjacent_segments_are_merged_and_others_are_not() {
        let (regions, whole) = test_memory();
        let part = |from, len| whole.slice(from, len).unwrap();
        let mut vectors = IoVectors::with_capacity(regions, 2);
        assert_eq!(vectors.set_all(&[part(0, 100), part(100, 50), part(200, 7)]), Ok(true));
        assert_eq!(lengths(&vectors), [150, 7]);
        let three = [part(0, 1), part(2, 1), part(4, 1)];
        assert_eq!(vectors.set_all(&three), Ok(false), "there is room for two");
        let stray = Segment { region: RegionId(9), offset: 0, len_bytes: 1 };
        assert_eq!(vectors.set_all(&[stray]).unwrap_err().0, stray);
    }

    #[test]
    fn list_advances_in_steps_of_any_size() {
        let (regions, whole) = test_memory();
        let part = |from, len| whole.slice(from, len).unwrap();
        let mut vectors = IoVectors::with_capacity(regions, 3);
        for step in 1..=12 {
            vectors.set_all(&[part(0, 5), part(10, 4), part(20, 3)]).unwrap();
            let mut left = 12_usize;
            while left > 0 {
                let count = step.min(left);
                left -= count;
                assert_eq!(vectors.advance_list(count), left > 0);
                assert_eq!(lengths(&vectors).iter().sum::<usize>(), left);
            }
        }
    }

    #[test]
    fn bytes_are_written_to_and_read_from_a_file_in_order() {
        let (regions, whole) = test_memory();
        let part = |from, len| whole.slice(from, len).unwrap();
        let file = tempfile::tempfile().unwrap();
        regions.store(part(0, 6), b"abcdef").unwrap();
        let mut vectors = IoVectors::with_capacity(regions.clone(), 2);
        vectors.set_all(&[part(3, 3), part(0, 3)]).unwrap();
        vectors.transfer_all(&file, 10, TransferDirection::ToFile).unwrap();
        vectors.set_all(&[part(100, 2), part(200, 4)]).unwrap();
        vectors.transfer_all(&file, 10, TransferDirection::FromFile).unwrap();
        let mut back = [0; 4];
        regions.load(part(200, 4), &mut back).unwrap();
        assert_eq!(&back, b"fabc");
        vectors.set_all(&[part(0, 7)]).unwrap();
        assert!(
            vectors.transfer_all(&file, 10, TransferDirection::FromFile).is_err(),
            "six bytes are there"
        );
    }
}
