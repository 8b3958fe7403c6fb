//! Memory that has no address in this process: the data of requests that the kernel has and lends.
//!
//! ```text
//!   a lent region    | request 0 | request 1 | …      each as long as a request may be
//! ```
//!
//! Such a region has a place in the table, of no length: whoever asks for the address of a part of it
//! is refused, as for memory that does not exist. Only who knows how to have it lent asks
//! [`lent`](Regions::lent). Who loads or stores a part has it copied by the lender, a system call each
//! time, and what was copied is [counted](Regions::copied_of_lent).

use std::io::{Error, ErrorKind};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};

use base::{NoSuchMemory, RegionId, Segment};

use super::{NoRegion, Regions, lies_inside, place_of};
use crate::mapping::{Backing, Mapping};

/// What was lent.
#[derive(Debug)]
pub(super) struct Lent {
    lender: Lender,
    /// Bytes of a request.
    each: u32,
    len_bytes: u64,
    /// Bytes that were loaded or stored.
    copied_bytes: AtomicU64,
}

/// Who lends the data of requests.
#[derive(Debug)]
pub struct Lender {
    /// Whom to ask for them.
    pub descriptor: OwnedFd,
    /// Which queue of that.
    pub queue: u16,
    /// Where in the descriptor the data lie, by queue, request and byte, for whoever copies them.
    pub data_at: fn(u16, u16, u32) -> u64,
}

/// A part of the data of a request.
#[derive(Clone, Copy, Debug)]
pub struct LentPart<'a> {
    /// Whom to ask for it.
    pub descriptor: BorrowedFd<'a>,
    /// Which queue of that.
    pub queue: u16,
    /// Which request of the queue.
    pub request: u16,
    /// The first byte of the request that is meant.
    pub byte: u32,
    /// How many.
    pub len_bytes: u32,
}

impl Regions {
    /// A region, for as long as the table lives, of the data of `requests` requests of `each` bytes
    /// that `lender` lends.
    ///
    /// # Errors
    ///
    /// If the table is full.
    pub fn lend(&self, lender: Lender, (requests, each): (u16, u32)) -> Result<Segment, NoRegion> {
        // Nobody gets an address in it, so nothing of it is ever touched.
        let mapping = Mapping::new(4096, Backing::Private).map_err(NoRegion::Unmapped)?;
        let len_bytes = u64::from(requests) * u64::from(each);
        let empty = self.add_part(&mut self.places(), mapping, 0).map_err(NoRegion::Full)?;
        let slot = self.table.lent.get(place_of(empty.region) as usize);
        let lent = Lent { lender, each, len_bytes, copied_bytes: AtomicU64::new(0) };
        // A place is given once, so it has nothing yet.
        slot.map(|slot| slot.get_or_init(|| lent));
        Ok(Segment { len_bytes: u32::try_from(len_bytes).unwrap_or(u32::MAX), ..empty })
    }

    /// What `segment` is a part of, if it lies in one request that is lent.
    pub fn lent(&self, segment: Segment) -> Option<LentPart<'_>> {
        let lent = self.lent_region(segment.region)?;
        if !lies_inside(segment, lent.len_bytes) {
            return None;
        }
        let each = u64::from(lent.each);
        let (request, byte) = (segment.offset.checked_div(each)?, segment.offset % each);
        if byte + u64::from(segment.len_bytes) > each {
            return None;
        }
        Some(LentPart {
            descriptor: lent.lender.descriptor.as_fd(),
            queue: lent.lender.queue,
            request: u16::try_from(request).ok()?,
            byte: u32::try_from(byte).ok()?,
            len_bytes: segment.len_bytes,
        })
    }

    /// How many bytes of a lent region were copied so far, by who loaded or stored them.
    pub fn copied_of_lent(&self, region: RegionId) -> u64 {
        self.lent_region(region).map_or(0, |lent| lent.copied_bytes.load(Ordering::Relaxed))
    }

    fn lent_region(&self, region: RegionId) -> Option<&Lent> {
        let place = place_of(region);
        let lent = self.table.lent.get(place as usize)?.get()?;
        (region.0 == place).then_some(lent)
    }

    /// As [`load`](base::Memory::load), of what has no address here.
    #[cold]
    pub(super) fn load_lent(&self, segment: Segment, into: &mut [u8]) -> Result<(), NoSuchMemory> {
        self.copy_lent(segment, into.len(), |lender, at, done| {
            let rest = &mut into[done..];
            // SAFETY: the descriptor is open for as long as the table lives, and `rest` is borrowed
            // for the call, which writes no more than its length.
            unsafe { libc::pread(lender, rest.as_mut_ptr().cast(), rest.len(), at) }
        })
    }

    /// As [`store`](base::Memory::store), of what has no address here.
    #[cold]
    pub(super) fn store_lent(&self, segment: Segment, from: &[u8]) -> Result<(), NoSuchMemory> {
        self.copy_lent(segment, from.len(), |lender, at, done| {
            let rest = &from[done..];
            // SAFETY: as in `load_lent`; the call only reads.
            unsafe { libc::pwrite(lender, rest.as_ptr().cast(), rest.len(), at) }
        })
    }

    /// Has the lender copy all of a part, `len` bytes: `step` is told who that is, where the rest lies there, and
    /// how much is done.
    fn copy_lent(
        &self,
        segment: Segment,
        len: usize,
        mut step: impl FnMut(i32, i64, usize) -> isize,
    ) -> Result<(), NoSuchMemory> {
        let refuse = NoSuchMemory(segment);
        let part = self.lent(segment).ok_or(refuse)?;
        let lent = self.lent_region(segment.region).ok_or(refuse)?;
        let first = (lent.lender.data_at)(part.queue, part.request, part.byte);
        assert_eq!(len, segment.len_bytes as usize, "the two lengths are the caller's");
        let mut done = 0;
        while done < len {
            let at = i64::try_from(first + done as u64).map_err(|_| refuse)?;
            match usize::try_from(step(part.descriptor.as_raw_fd(), at, done)) {
                // The request has gone, or is shorter than it said.
                Ok(0) => return Err(refuse),
                Ok(count) => done += count,
                Err(_) if Error::last_os_error().kind() == ErrorKind::Interrupted => {}
                Err(_) => return Err(refuse),
            }
        }
        lent.copied_bytes.fetch_add(u64::from(part.len_bytes), Ordering::Relaxed);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::{AsRawFd, OwnedFd};

    use base::{Memory, RegionId, Segment};

    use super::Lender;
    use crate::{Backing, Mapping, Regions};

    fn lender(descriptor: OwnedFd, queue: u16) -> Lender {
        let data_at = |queue, request, byte| {
            1000 * u64::from(queue) + 100 * u64::from(request) + u64::from(byte)
        };
        Lender { descriptor, queue, data_at }
    }

    fn descriptor() -> OwnedFd {
        std::io::pipe().unwrap().0.into()
    }

    #[test]
    fn what_is_lent_is_known_by_its_request_and_has_no_address() {
        let regions = Regions::new(4);
        let memory = regions.allocate(4096).unwrap();
        let descriptor = descriptor();
        let number = descriptor.as_raw_fd();
        let whole = regions.lend(lender(descriptor, 3), (4, 8192)).unwrap();
        assert_eq!(whole.len_bytes, 4 * 8192);
        let part = regions.lent(whole.slice(2 * 8192 + 512, 1024).unwrap()).unwrap();
        assert_eq!(part.descriptor.as_raw_fd(), number);
        assert_eq!((part.queue, part.request, part.byte, part.len_bytes), (3, 2, 512, 1024));
        assert!(regions.lent(whole.slice(3 * 8192, 8192).unwrap()).is_some(), "the last one");
        let outside = Segment { offset: 4 * 8192, len_bytes: 512, ..whole };
        let across = Segment { offset: 8192 - 512, len_bytes: 1024, ..whole };
        let later = Segment { region: RegionId(whole.region.0 | 1 << 12), ..whole };
        let later = later.slice(0, 512).unwrap();
        for none in [outside, across, later, memory.segment()] {
            assert!(regions.lent(none).is_none(), "{none:?}");
        }
        for part in [whole, whole.slice(0, 1).unwrap(), outside] {
            assert!(regions.address(part).is_err(), "{part:?}");
            assert!(regions.load(part, &mut vec![0; part.len_bytes as usize]).is_err());
        }
        assert_eq!(regions.count(), 1, "of memory");
    }

    #[test]
    fn a_full_table_lends_nothing() {
        let regions = Regions::new(1);
        let _memory = regions.allocate(4096).unwrap();
        assert!(regions.lend(lender(descriptor(), 0), (1, 4096)).is_err());
    }

    #[test]
    fn what_is_loaded_and_stored_is_copied_by_the_lender_and_counted() {
        let regions = Regions::new(4);
        let mapping = Mapping::new(8192, Backing::Shared).unwrap();
        let file = mapping.descriptor().unwrap().try_clone_to_owned().unwrap();
        let memory = regions.add(mapping).unwrap();
        let whole = regions.lend(lender(file, 2), (60, 100)).unwrap();
        let part = whole.slice(100 + 10, 20).unwrap();
        regions.store(part, &[7; 20]).unwrap();
        let mut all = vec![0; 8192];
        regions.load(memory, &mut all).unwrap();
        assert!(
            all.iter().enumerate().all(|(at, byte)| (*byte == 7) == (2110..2130).contains(&at))
        );
        let mut some = [0; 30];
        regions.load(whole.slice(100 + 5, 30).unwrap(), &mut some).unwrap();
        assert_eq!(
            (&some[..5], &some[5..25], &some[25..]),
            (&[0; 5][..], &[7; 20][..], &[0; 5][..])
        );
        let across = whole.slice(90, 20).unwrap();
        assert!(regions.store(across, &[1; 20]).is_err(), "parts of two requests");
        let behind = whole.slice(5980, 10).unwrap();
        assert!(regions.load(behind, &mut some[..10]).is_ok());
        assert_eq!(regions.copied_of_lent(whole.region), 20 + 30 + 10);
        assert_eq!(regions.copied_of_lent(memory.region), 0);
        let later = whole.slice(0, 4).map(|part| Segment { region: RegionId(77), ..part }).unwrap();
        assert!(regions.store(later, &[1; 4]).is_err());
    }

    #[test]
    fn a_request_that_has_gone_is_no_memory() {
        let regions = Regions::new(2);
        let mapping = Mapping::new(4096, Backing::Shared).unwrap();
        let file = mapping.descriptor().unwrap().try_clone_to_owned().unwrap();
        let whole = regions.lend(lender(file, 4), (200, 100)).unwrap();
        assert!(regions.load(whole.slice(0, 96).unwrap(), &mut [0; 96]).is_ok());
        assert!(
            regions.load(whole.slice(0, 97).unwrap(), &mut [0; 97]).is_err(),
            "of a file's end"
        );
        assert_eq!(regions.copied_of_lent(whole.region), 96);
    }
}
