//! The memory of a guest: where each of its addresses lies here.

use core::fmt;

use base::{RegionId, Segment};

/// A stretch of memory that the front end shares.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Area {
    /// Where it begins for the guest, whose rings name their data so.
    pub guest: u64,
    /// Where it begins in the front end, which names the rings themselves so.
    pub user: u64,
    /// How long it is.
    pub len_bytes: u64,
    /// Where it lies here.
    pub region: RegionId,
    /// From which byte on.
    pub offset: u64,
}

/// All of them, none over another.
#[derive(Clone, Debug, Default)]
pub struct Space {
    /// By guest address.
    areas: Vec<Area>,
}

/// An address at which there is no memory, or not as much.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Outside {
    /// The address.
    pub address: u64,
    /// How much was asked for.
    pub len_bytes: u64,
}

impl Space {
    /// The memory that `areas` are. `None` if one lies over another, in the guest or in the front
    /// end, or goes past the last address.
    pub fn new(mut areas: Vec<Area>) -> Option<Self> {
        areas.sort_unstable_by_key(|area| area.user);
        let has_order = |begin: fn(&Area) -> u64, areas: &[Area]| {
            let ends = |area: &Area| begin(area).checked_add(area.len_bytes);
            areas.iter().all(|area| area.len_bytes > 0 && ends(area).is_some())
                && areas.is_sorted_by(|one, next| ends(one).is_some_and(|end| end <= begin(next)))
        };
        let is_right = has_order(|area| area.user, &areas);
        areas.sort_unstable_by_key(|area| area.guest);
        (is_right && has_order(|area| area.guest, &areas)).then_some(Self { areas })
    }

    /// What it is made of, by guest address.
    pub fn areas(&self) -> &[Area] {
        &self.areas
    }

    /// Appends the pieces of `len_bytes` at a guest address: more than one if stretches meet there.
    ///
    /// # Errors
    ///
    /// If some of it is no memory, or there would be more than `pieces_max` in `into`.
    #[inline]
    pub fn resolve(
        &self,
        address: u64,
        len_bytes: u32,
        pieces_max: usize,
        into: &mut Vec<Segment>,
    ) -> Result<(), Outside> {
        let outside = Outside { address, len_bytes: len_bytes.into() };
        let (mut at, mut left) = (address, len_bytes);
        while left > 0 {
            let after = self.areas.partition_point(|area| area.guest <= at);
            let area = after.checked_sub(1).and_then(|index| self.areas.get(index));
            let area = area.ok_or(outside)?;
            let skip = at - area.guest;
            if skip >= area.len_bytes || into.len() >= pieces_max {
                return Err(outside);
            }
            let room = u32::try_from(area.len_bytes - skip).unwrap_or(u32::MAX);
            let len_bytes = left.min(room);
            into.push(Segment { region: area.region, offset: area.offset + skip, len_bytes });
            left -= len_bytes;
            at = at.checked_add(len_bytes.into()).filter(|_| left > 0).unwrap_or(at);
        }
        Ok(())
    }

    /// The whole of `len_bytes` at an address of the front end, which lies in one stretch.
    ///
    /// # Errors
    ///
    /// If it does not.
    pub fn at_user(&self, address: u64, len_bytes: u32) -> Result<Segment, Outside> {
        let outside = Outside { address, len_bytes: len_bytes.into() };
        let around = |area: &&Area| {
            let skip = address.wrapping_sub(area.user);
            skip < area.len_bytes && u64::from(len_bytes) <= area.len_bytes - skip
        };
        let area = self.areas.iter().find(around).ok_or(outside)?;
        let offset = area.offset + (address - area.user);
        Ok(Segment { region: area.region, offset, len_bytes })
    }
}

impl fmt::Display for Outside {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { address, len_bytes } = self;
        write!(out, "{len_bytes} bytes at {address:#x} are not in shared memory")
    }
}

impl core::error::Error for Outside {}
