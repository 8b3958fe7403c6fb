//! Regions of a device: what they are like, as it is asked for and told.

use crate::bytes::{Reader, Writer};
use crate::{Command, Violation};

/// A region (Protocol Specification, VFIO_USER_DEVICE_GET_REGION_INFO). One of size 0 is not there.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RegionShape {
    /// How long it is.
    pub size: u64,
    /// Whether it may be read by message.
    pub is_readable: bool,
    /// Whether it may be written by message.
    pub is_writable: bool,
    /// Where in its descriptor it begins.
    pub file_offset: u64,
    /// What of it can be mapped: nothing if there are none.
    pub areas: Vec<Area>,
}

/// A part of a region that can be mapped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Area {
    /// Where in the region it begins.
    pub offset: u64,
    /// How long it is.
    pub size: u64,
}

/// Bytes of the structure without capabilities.
pub(crate) const INFO_BYTES: usize = 32;
/// Where capabilities begin: behind it.
const FIRST_CAPABILITY: u32 = 32;

const READ: u32 = 1;
const WRITE: u32 = 1 << 1;
const MMAP: u32 = 1 << 2;
const CAPS: u32 = 1 << 3;
/// `VFIO_REGION_INFO_CAP_SPARSE_MMAP`.
const SPARSE_MMAP: u16 = 1;
/// The most areas of a region that are looked at, and the most capabilities.
const AREAS_MAX: usize = 64;
const CAPABILITIES_MAX: usize = 16;

impl RegionShape {
    /// How long the whole reply is.
    pub(crate) fn reply_bytes(&self) -> usize {
        let sparse = if self.areas.is_empty() { 0 } else { 16 + 16 * self.areas.len() };
        INFO_BYTES + sparse
    }

    /// The body of a reply of at most `room` bytes. If that is not enough for the capabilities, they
    /// are left out, and the length that it takes is told.
    pub(crate) fn body(&self, index: u32, room: usize) -> Vec<u8> {
        let needed = self.reply_bytes();
        let has_areas = !self.areas.is_empty() && room >= needed;
        let mut flags = 0;
        for (is_so, flag) in [
            (self.is_readable, READ),
            (self.is_writable, WRITE),
            (!self.areas.is_empty(), MMAP | CAPS),
        ] {
            flags |= if is_so { flag } else { 0 };
        }
        let fixed = Writer::default()
            .u32(u32::try_from(needed).unwrap_or(u32::MAX))
            .u32(flags)
            .u32(index)
            .u32(if has_areas { FIRST_CAPABILITY } else { 0 })
            .u64(self.size)
            .u64(self.file_offset);
        if !has_areas {
            return fixed.done();
        }
        let count = u32::try_from(self.areas.len()).unwrap_or(u32::MAX);
        let head = fixed.u16(SPARSE_MMAP).u16(1).u32(0).u32(count).u32(0);
        self.areas.iter().fold(head, |body, area| body.u64(area.offset).u64(area.size)).done()
    }

    /// Reads the reply about region `index`.
    pub(crate) fn parse(body: &[u8], index: u32) -> Result<Self, Violation> {
        let refuse = |expected| Violation::Body {
            command: Command::DeviceGetRegionInfo,
            found: body.len(),
            expected,
        };
        let short = || refuse("32 bytes, and the capabilities that they name");
        let mut reader = Reader(body);
        let mut next = || reader.u32().ok_or_else(short);
        let (_, flags, found, first) = (next()?, next()?, next()?, next()?);
        let size = reader.u64().ok_or_else(short)?;
        let file_offset = reader.u64().ok_or_else(short)?;
        if found != index {
            return Err(field("index", found.into(), "the region that was asked about"));
        }
        let sparse = if flags & CAPS != 0 && first != 0 { areas(body, first)? } else { None };
        let is_mappable = flags & MMAP != 0;
        let areas = match sparse {
            _ if !is_mappable => Vec::new(),
            None => vec![Area { offset: 0, size }],
            Some(areas) => areas,
        };
        let is_inside = |area: &Area| area.offset.checked_add(area.size).is_some_and(|e| e <= size);
        if let Some(stray) = areas.iter().find(|area| !is_inside(area)) {
            return Err(field("area offset", stray.offset, "an area inside of the region"));
        }
        let (is_readable, is_writable) = (flags & READ != 0, flags & WRITE != 0);
        Ok(Self { size, is_readable, is_writable, file_offset, areas })
    }
}

fn field(field: &'static str, found: u64, expected: &'static str) -> Violation {
    Violation::Field { command: Command::DeviceGetRegionInfo, field, found, expected }
}

/// Follows the list of capabilities from `first` on to the one about areas.
fn areas(body: &[u8], first: u32) -> Result<Option<Vec<Area>>, Violation> {
    let stray = |at: u32| field("cap_offset", at.into(), "a place inside of the message");
    let mut at = first;
    for _ in 0..CAPABILITIES_MAX {
        let bytes = body.get(at as usize..).filter(|_| at as usize >= INFO_BYTES);
        let mut reader = Reader(bytes.ok_or_else(|| stray(at))?);
        let (Some(id), Some(_), Some(next)) = (reader.u16(), reader.u16(), reader.u32()) else {
            return Err(stray(at));
        };
        if id == SPARSE_MMAP {
            let (Some(count), Some(_)) = (reader.u32(), reader.u32()) else {
                return Err(stray(at));
            };
            if count as usize > AREAS_MAX {
                return Err(field("nr_areas", count.into(), "at most 64"));
            }
            let mut area = || Some(Area { offset: reader.u64()?, size: reader.u64()? });
            let areas: Option<_> = (0..count).map(|_| area()).collect();
            return areas.ok_or_else(|| stray(at)).map(Some);
        }
        if next == 0 {
            return Ok(None);
        }
        at = next;
    }
    Err(field("next", at.into(), "a list that ends"))
}
