//! One list of addresses per call, on the stack of the call.

use std::marker::PhantomData;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, BorrowedFd};

use base::{NoSuchMemory, Segment, Stretch};
use dma::Regions;
use rustix::io::Errno;

use crate::vectored::last_errno;

/// What one system call sends or fills: headers and region memory, in order. What it names cannot
/// go while it lives.
pub(crate) struct Gather<'a> {
    list: [MaybeUninit<libc::iovec>; STRETCHES_MAX],
    count: usize,
    len_bytes: usize,
    memory_bytes: usize,
    memory_pieces: usize,
    regions: &'a Regions,
    headers: PhantomData<&'a [u8]>,
}

/// Half of what the kernel allows (`IOV_MAX`).
const STRETCHES_MAX: usize = 512;

impl<'a> Gather<'a> {
    #[inline]
    pub(crate) fn new(regions: &'a Regions) -> Self {
        let list = [const { MaybeUninit::uninit() }; STRETCHES_MAX];
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

    /// Adds as many of `stretches` as there is room for, and says whether that is all of them.
    ///
    /// # Panics
    ///
    /// If a stretch lies outside the headers.
    #[inline]
    pub(crate) fn add_all(
        &mut self,
        headers: &'a [u8],
        stretches: &[Stretch],
    ) -> Result<bool, NoSuchMemory> {
        for stretch in stretches {
            let has_room = match *stretch {
                Stretch::Headers { at, len_bytes } => {
                    let part = &headers[at as usize..][..len_bytes as usize];
                    self.add(part.as_ptr().cast_mut(), part.len())
                }
                Stretch::Memory(segment) => self.add_segment(segment)?,
            };
            if !has_room {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Adds a piece of region memory. False if there is no room.
    #[inline]
    pub(crate) fn add_segment(&mut self, segment: Segment) -> Result<bool, NoSuchMemory> {
        let address = self.regions.address(segment)?;
        let has_room = self.add(address.as_ptr(), segment.len_bytes as usize);
        if has_room {
            self.memory_bytes += segment.len_bytes as usize;
            self.memory_pieces += 1;
        }
        Ok(has_room)
    }

    #[inline]
    fn add(&mut self, base: *mut u8, len: usize) -> bool {
        if len == 0 {
            return true;
        }
        let Some(entry) = self.list.get_mut(self.count) else { return false };
        entry.write(libc::iovec { iov_base: base.cast(), iov_len: len });
        self.count += 1;
        self.len_bytes += len;
        true
    }

    /// How many bytes it names.
    #[inline]
    pub(crate) fn len_bytes(&self) -> usize {
        self.len_bytes
    }

    /// Whether its pieces of region memory are so long, taken together.
    #[inline]
    pub(crate) fn has_pieces_of(&self, len_bytes: usize) -> bool {
        self.memory_pieces > 0 && self.memory_bytes >= len_bytes.saturating_mul(self.memory_pieces)
    }

    /// Gives a socket what it names, as far as that takes it.
    #[inline]
    pub(crate) fn send(&mut self, socket: BorrowedFd<'_>, flags: i32) -> Result<usize, Errno> {
        let message = self.message();
        let flags = flags | libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
        // SAFETY: `message` names the first `count` entries, all of which `add` has written, each
        // either a part of the headers, borrowed for as long as this lives, or region memory, kept
        // mapped by the regions, borrowed for as long. The kernel only reads them.
        let moved = unsafe { libc::sendmsg(socket.as_raw_fd(), &raw const message, flags) };
        usize::try_from(moved).map_err(|_| last_errno())
    }

    /// Takes what a socket has, as far as the list reaches. The list must name region memory only.
    #[inline]
    fn receive(&mut self, socket: BorrowedFd<'_>) -> Result<usize, Errno> {
        let mut message = self.message();
        // SAFETY: as in `send`, and nobody holds a reference into a region, which is all that a
        // list made by `scatter` names.
        let moved =
            unsafe { libc::recvmsg(socket.as_raw_fd(), &raw mut message, libc::MSG_DONTWAIT) };
        usize::try_from(moved).map_err(|_| last_errno())
    }

    /// A message that is the list and nothing else: no address, no control data.
    #[inline]
    fn message(&mut self) -> libc::msghdr {
        // SAFETY: all zeroes is a valid `msghdr`: null pointers with lengths of zero.
        let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
        message.msg_iovlen = self.count;
        message.msg_iov = self.list.as_mut_ptr().cast();
        message
    }
}

/// Takes what a socket has to `segments`, first one first, as far as they reach.
#[inline]
pub(crate) fn scatter(
    regions: &Regions,
    segments: &[Segment],
    socket: BorrowedFd<'_>,
) -> Result<Result<usize, Errno>, NoSuchMemory> {
    let mut list = Gather::new(regions);
    for segment in segments {
        if !list.add_segment(*segment)? {
            break;
        }
    }
    Ok(list.receive(socket))
}
