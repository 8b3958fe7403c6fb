//! Memory that has no address in this process: the data of requests that the kernel has and lends.
//!
//! ```text
//!   a lent region    | request 0 | request 1 | …      each as long as a request may be
//! ```
//!
//! Such a region has a place in the table, of no length: whoever asks for the address of a part of it
//! is refused, as for memory that does not exist. Only who knows how to have it lent asks
//! [`lent`](Regions::lent).

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use base::Segment;

use super::{NoRegion, Regions, lies_inside, place_of};
use crate::mapping::{Backing, Mapping};

/// What was lent.
#[derive(Debug)]
pub(super) struct Lent {
    descriptor: OwnedFd,
    queue: u16,
    /// Bytes of a request.
    each: u32,
    len_bytes: u64,
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
    /// that are lent by queue `queue` of what `descriptor` is.
    ///
    /// # Errors
    ///
    /// If the table is full.
    pub fn lend(
        &self,
        descriptor: OwnedFd,
        queue: u16,
        (requests, each): (u16, u32),
    ) -> Result<Segment, NoRegion> {
        // Nobody gets an address in it, so nothing of it is ever touched.
        let mapping = Mapping::new(4096, Backing::Private).map_err(NoRegion::Unmapped)?;
        let len_bytes = u64::from(requests) * u64::from(each);
        let empty = self.add_part(&mut self.places(), mapping, 0).map_err(NoRegion::Full)?;
        let slot = self.table.lent.get(place_of(empty.region) as usize);
        let lent = Lent { descriptor, queue, each, len_bytes };
        // A place is given once, so it has nothing yet.
        slot.map(|slot| slot.get_or_init(|| lent));
        Ok(Segment { len_bytes: u32::try_from(len_bytes).unwrap_or(u32::MAX), ..empty })
    }

    /// What `segment` is a part of, if it lies in one request that is lent.
    pub fn lent(&self, segment: Segment) -> Option<LentPart<'_>> {
        let place = place_of(segment.region);
        let lent = self.table.lent.get(place as usize)?.get()?;
        if segment.region.0 != place || !lies_inside(segment, lent.len_bytes) {
            return None;
        }
        let each = u64::from(lent.each);
        let (request, byte) = (segment.offset.checked_div(each)?, segment.offset % each);
        if byte + u64::from(segment.len_bytes) > each {
            return None;
        }
        Some(LentPart {
            descriptor: lent.descriptor.as_fd(),
            queue: lent.queue,
            request: u16::try_from(request).ok()?,
            byte: u32::try_from(byte).ok()?,
            len_bytes: segment.len_bytes,
        })
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::{AsRawFd, OwnedFd};

    use base::{Memory, RegionId, Segment};

    use crate::Regions;

    fn descriptor() -> OwnedFd {
        std::io::pipe().unwrap().0.into()
    }

    #[test]
    fn what_is_lent_is_known_by_its_request_and_has_no_address() {
        let regions = Regions::new(4);
        let memory = regions.allocate(4096).unwrap();
        let descriptor = descriptor();
        let number = descriptor.as_raw_fd();
        let whole = regions.lend(descriptor, 3, (4, 8192)).unwrap();
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
        assert!(regions.lend(descriptor(), 0, (1, 4096)).is_err());
    }
}
