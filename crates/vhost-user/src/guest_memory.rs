//! Guest memory: translation of guest and front-end addresses to segments.

use core::fmt;

use tenmil_base::{RegionId, Segment};

/// Mapped memory region of the front end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GuestRegion {
    /// Guest address, used by descriptors.
    pub guest: u64,
    /// Address in the front end's process, used for the rings.
    pub user: u64,
    /// Length in bytes.
    pub len_bytes: u64,
    /// Mapped region.
    pub region: RegionId,
    /// Offset in the region.
    pub offset: u64,
}

/// Memory regions of a guest, without overlap.
#[derive(Clone, Debug, Default)]
pub struct GuestMemory {
    /// Regions by ascending guest address.
    regions: Vec<GuestRegion>,
}

/// Address range that is not mapped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InvalidAddress {
    /// Address.
    pub address: u64,
    /// Length in bytes.
    pub len_bytes: u64,
}

impl GuestMemory {
    /// Creates the address space of these regions. `None` if they overlap in guest or process
    /// addresses, or exceed the address space.
    pub fn new(mut areas: Vec<GuestRegion>) -> Option<Self> {
        areas.sort_unstable_by_key(|area| area.user);
        let has_order = |begin: fn(&GuestRegion) -> u64, areas: &[GuestRegion]| {
            let ends = |area: &GuestRegion| begin(area).checked_add(area.len_bytes);
            areas.iter().all(|area| area.len_bytes > 0 && ends(area).is_some())
                && areas.is_sorted_by(|one, next| ends(one).is_some_and(|end| end <= begin(next)))
        };
        let is_right = has_order(|area| area.user, &areas);
        areas.sort_unstable_by_key(|area| area.guest);
        (is_right && has_order(|area| area.guest, &areas)).then_some(Self { regions: areas })
    }

    /// Regions by ascending guest address.
    pub fn regions(&self) -> &[GuestRegion] {
        &self.regions
    }

    /// Appends the segments of `len_bytes` at a guest address; several if the range crosses
    /// regions.
    ///
    /// # Errors
    ///
    /// If a part is not mapped, or `into` would exceed `pieces_max`.
    #[inline]
    pub fn resolve_guest_address(
        &self,
        address: u64,
        len_bytes: u32,
        pieces_max: usize,
        into: &mut Vec<Segment>,
    ) -> Result<(), InvalidAddress> {
        let outside = InvalidAddress { address, len_bytes: len_bytes.into() };
        let (mut at, mut left) = (address, len_bytes);
        while left > 0 {
            let after = self.regions.partition_point(|area| area.guest <= at);
            let area = after.checked_sub(1).and_then(|index| self.regions.get(index));
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

    /// Segment of `len_bytes` at an address of the front end's process, within one region.
    ///
    /// # Errors
    ///
    /// If the range is not within one region.
    pub fn resolve_user_address(
        &self,
        address: u64,
        len_bytes: u32,
    ) -> Result<Segment, InvalidAddress> {
        let outside = InvalidAddress { address, len_bytes: len_bytes.into() };
        let around = |area: &&GuestRegion| {
            let skip = address.wrapping_sub(area.user);
            skip < area.len_bytes && u64::from(len_bytes) <= area.len_bytes - skip
        };
        let area = self.regions.iter().find(around).ok_or(outside)?;
        let offset = area.offset + (address - area.user);
        Ok(Segment { region: area.region, offset, len_bytes })
    }
}

impl fmt::Display for InvalidAddress {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { address, len_bytes } = self;
        write!(out, "{len_bytes} bytes at {address:#x} are not in shared memory")
    }
}

impl core::error::Error for InvalidAddress {}
