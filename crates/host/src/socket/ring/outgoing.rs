//! One send that the kernel has been asked for, and all that it may read until it has ended.

use base::{NoSuchMemory, Stretch};
use dma::Regions;

use crate::vectored::advance;

/// Addresses, and the headers they name. Boxed and not moved while the kernel has it.
pub(super) struct Outgoing {
    headers: Vec<u8>,
    list: Vec<libc::iovec>,
    /// How many entries at the front are done.
    done: usize,
    message: libc::msghdr,
    flags: i32,
    /// The kernel has not taken all of it yet.
    pub(super) is_sending: bool,
    /// It does not copy it.
    pub(super) by_reference: bool,
    /// How often it will still say that it has let go of something.
    pub(super) notices: u32,
    /// The first byte of it, of all that were ever taken.
    pub(super) from: u64,
}

/// As many stretches go in one call, at most: half of `IOV_MAX`.
const STRETCHES_MAX: usize = 512;

// SAFETY: the addresses in here are those of its own headers and of region memory, which are valid
// on every thread; nothing in here is tied to one.
unsafe impl Send for Outgoing {}

impl Outgoing {
    pub(super) fn new() -> Self {
        // SAFETY: all zeroes is a valid `msghdr`: null pointers with lengths of zero.
        let message: libc::msghdr = unsafe { std::mem::zeroed() };
        let (headers, list) = (Vec::new(), Vec::new());
        Self {
            headers,
            list,
            done: 0,
            message,
            flags: 0,
            is_sending: false,
            by_reference: false,
            notices: 0,
            from: 0,
        }
    }

    /// Whether the kernel has nothing of it.
    pub(super) fn is_free(&self) -> bool {
        !self.is_sending && self.notices == 0
    }

    /// Takes as many of `stretches` as go in one call, and says how many bytes that are.
    pub(super) fn fill(
        &mut self,
        regions: &Regions,
        headers: &[u8],
        stretches: &[Stretch],
        has_more: bool,
    ) -> Result<usize, NoSuchMemory> {
        self.headers.clear();
        self.headers.extend_from_slice(headers);
        self.list.clear();
        self.done = 0;
        let mut taken = 0;
        for stretch in stretches.iter().take(STRETCHES_MAX) {
            let (base, len) = match *stretch {
                Stretch::Headers { at, len_bytes } => {
                    let part = &mut self.headers[at as usize..][..len_bytes as usize];
                    (part.as_mut_ptr(), part.len())
                }
                Stretch::Memory(segment) => {
                    (regions.address(segment)?.as_ptr(), segment.len_bytes as usize)
                }
            };
            if len > 0 {
                self.list.push(libc::iovec { iov_base: base.cast(), iov_len: len });
                taken += len;
            }
        }
        let more = has_more || stretches.len() > STRETCHES_MAX;
        self.flags = libc::MSG_NOSIGNAL | libc::MSG_WAITALL;
        self.flags |= if more { libc::MSG_MORE } else { 0 };
        Ok(taken)
    }

    /// What the kernel is given: valid, and what it names as well, until this is changed or gone.
    pub(super) fn message(&mut self) -> (*const libc::msghdr, u32) {
        let rest = &mut self.list[self.done..];
        self.message.msg_iovlen = rest.len();
        self.message.msg_iov = rest.as_mut_ptr();
        (&raw const self.message, self.flags.cast_unsigned())
    }

    /// Takes `count` bytes off the front. Returns whether anything is left.
    pub(super) fn advance(&mut self, count: usize) -> bool {
        advance(&mut self.list, &mut self.done, count)
    }
}

#[cfg(test)]
mod tests {
    use base::Stretch;
    use dma::Regions;

    use super::Outgoing;

    #[test]
    fn a_send_that_stops_halfway_goes_on_where_it_stopped() {
        let mut outgoing = Outgoing::new();
        let stretches = [(0, 3), (5, 2)].map(|(at, len_bytes)| Stretch::Headers { at, len_bytes });
        let len = outgoing.fill(&Regions::new(1), b"abcdefg", &stretches, false).unwrap();
        assert_eq!(len, 5);
        assert!(outgoing.advance(2));
        assert_eq!(outgoing.list[outgoing.done..].len(), 2);
        assert_eq!(outgoing.list[0].iov_len, 1);
        assert!(outgoing.advance(1));
        assert_eq!(outgoing.list[outgoing.done..].len(), 1);
        assert!(!outgoing.advance(2));
    }
}
