//! Address list for one system call, on the caller's stack.

use std::marker::PhantomData;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, BorrowedFd};

use rustix::io::Errno;
use tenmil_base::{InvalidSegment, Segment, SendSlice};
use tenmil_dma::RegionTable;

use crate::io_vectors::last_errno;

/// Buffers of one system call: headers and region memory, in order. Borrows everything that it
/// names.
pub(crate) struct GatherList<'a> {
    list: [MaybeUninit<libc::iovec>; SLICES_MAX],
    count: usize,
    len_bytes: usize,
    memory_bytes: usize,
    memory_pieces: usize,
    regions: &'a RegionTable,
    headers: PhantomData<&'a [u8]>,
}

/// Half of the kernel's limit (`IOV_MAX`).
const SLICES_MAX: usize = 512;

impl<'a> GatherList<'a> {
    #[inline]
    pub(crate) fn new(regions: &'a RegionTable) -> Self {
        let list = [const { MaybeUninit::uninit() }; SLICES_MAX];
        Self {
            list,
            count: 0,
            len_bytes: 0,
            memory_bytes: 0,
            memory_pieces: 0,
            regions,
            headers: PhantomData,
        }
    }

    /// Adds as many of `stretches` as fit, and returns whether all did.
    ///
    /// # Panics
    ///
    /// If a slice is outside the headers.
    #[inline]
    pub(crate) fn add_all(
        &mut self,
        headers: &'a [u8],
        stretches: &[SendSlice],
    ) -> Result<bool, InvalidSegment> {
        for stretch in stretches {
            let has_space = match *stretch {
                SendSlice::Headers { at, len_bytes } => {
                    let part = &headers[at as usize..][..len_bytes as usize];
                    self.add_bytes(part.as_ptr().cast_mut(), part.len())
                }
                SendSlice::Memory(segment) => self.add_segment(segment)?,
            };
            if !has_space {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Adds a segment of region memory. False if the list is full.
    #[inline]
    pub(crate) fn add_segment(&mut self, segment: Segment) -> Result<bool, InvalidSegment> {
        let address = self.regions.host_address(segment)?;
        let has_space = self.add_bytes(address.as_ptr(), segment.len_bytes as usize);
        if has_space {
            self.memory_bytes += segment.len_bytes as usize;
            self.memory_pieces += 1;
        }
        Ok(has_space)
    }

    #[inline]
    fn add_bytes(&mut self, base: *mut u8, len: usize) -> bool {
        if len == 0 {
            return true;
        }
        let Some(entry) = self.list.get_mut(self.count) else { return false };
        entry.write(libc::iovec { iov_base: base.cast(), iov_len: len });
        self.count += 1;
        self.len_bytes += len;
        true
    }

    /// Total length in bytes.
    #[inline]
    pub(crate) fn len_bytes(&self) -> usize {
        self.len_bytes
    }

    /// Whether the average length of its region segments reaches `len_bytes`.
    #[inline]
    pub(crate) fn is_average_segment_at_least(&self, len_bytes: usize) -> bool {
        self.memory_pieces > 0 && self.memory_bytes >= len_bytes.saturating_mul(self.memory_pieces)
    }

    /// Sends the list, as far as the socket has space.
    #[inline]
    pub(crate) fn send(&mut self, socket: BorrowedFd<'_>, flags: i32) -> Result<usize, Errno> {
        let message = self.message_header();
        let flags = flags | libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
        // SAFETY: `message` names the first `count` entries, all written by `add`, each either a
        // part of the headers, which are borrowed by `self`, or region memory, kept mapped by the
        // regions, which are borrowed as well. The kernel only reads them.
        let moved = unsafe { libc::sendmsg(socket.as_raw_fd(), &raw const message, flags) };
        usize::try_from(moved).map_err(|_| last_errno())
    }

    /// Receives into the list. The list must name region memory, and bytes that nothing else accesses
    /// meanwhile, only.
    #[inline]
    fn receive(&mut self, socket: BorrowedFd<'_>) -> Result<usize, Errno> {
        let mut message = self.message_header();
        // SAFETY: as in `send`; no reference into a region exists, and the list of
        // `receive_scattered` names regions and bytes that it has borrowed for writing.
        let moved =
            unsafe { libc::recvmsg(socket.as_raw_fd(), &raw mut message, libc::MSG_DONTWAIT) };
        usize::try_from(moved).map_err(|_| last_errno())
    }

    /// Message header for the list: no address, no control data.
    #[inline]
    fn message_header(&mut self) -> libc::msghdr {
        // SAFETY: all zeroes is a valid `msghdr`: null pointers with lengths of zero.
        let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
        // `as _`: the field is narrower with musl.
        message.msg_iovlen = self.count as _;
        message.msg_iov = self.list.as_mut_ptr().cast();
        message
    }
}

/// Receives from a socket into `segments`, in order, and then into `following`.
#[inline]
pub(crate) fn receive_scattered(
    regions: &RegionTable,
    segments: &[Segment],
    following: &mut [u8],
    socket: BorrowedFd<'_>,
) -> Result<Result<usize, Errno>, InvalidSegment> {
    let mut list = GatherList::new(regions);
    let mut has_space = true;
    for segment in segments {
        has_space = list.add_segment(*segment)?;
        if !has_space {
            break;
        }
    }
    if has_space {
        list.add_bytes(following.as_mut_ptr(), following.len());
    }
    Ok(list.receive(socket))
}
