//! Device regions: properties and their encoding.

use crate::body_codec::{BodyReader, BodyWriter};
use crate::{Command, Violation};

/// Properties of a region (Protocol Specification, VFIO_USER_DEVICE_GET_REGION_INFO). A region of
/// size 0 does not exist.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RegionInfo {
    /// Size in bytes.
    pub size: u64,
    /// Whether it can be read by message.
    pub is_readable: bool,
    /// Whether it can be written by message.
    pub is_writable: bool,
    /// Offset of the region in its file.
    pub file_offset: u64,
    /// Mappable areas; empty if the region cannot be mapped.
    pub areas: Vec<SparseMmapArea>,
}

/// Mappable area of a region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SparseMmapArea {
    /// Offset in the region.
    pub offset: u64,
    /// Size in bytes.
    pub size: u64,
}

/// Size of the structure without capabilities, in bytes.
pub(crate) const INFO_BYTES: usize = 32;
/// Offset of the first capability, after the structure.
const FIRST_CAPABILITY: u32 = 32;

const READ: u32 = 1;
const WRITE: u32 = 1 << 1;
const MMAP: u32 = 1 << 2;
const CAPS: u32 = 1 << 3;
/// `VFIO_REGION_INFO_CAP_SPARSE_MMAP`.
const SPARSE_MMAP: u16 = 1;
/// Largest number of areas that are parsed, and of capabilities.
const AREAS_MAX: usize = 64;
const CAPABILITIES_MAX: usize = 16;

impl RegionInfo {
    /// Length of the complete reply in bytes.
    pub(crate) fn encoded_len(&self) -> usize {
        let sparse = if self.areas.is_empty() { 0 } else { 16 + 16 * self.areas.len() };
        INFO_BYTES + sparse
    }

    /// Encodes a reply of at most `room` bytes. If the capabilities do not fit, they are omitted,
    /// and `argsz` reports the required length.
    pub(crate) fn encode(&self, index: u32, room: usize) -> Vec<u8> {
        let needed = self.encoded_len();
        let has_areas = !self.areas.is_empty() && room >= needed;
        let mut flags = 0;
        for (is_so, flag) in [
            (self.is_readable, READ),
            (self.is_writable, WRITE),
            (!self.areas.is_empty(), MMAP | CAPS),
        ] {
            flags |= if is_so { flag } else { 0 };
        }
        let fixed = BodyWriter::default()
            .u32(u32::try_from(needed).unwrap_or(u32::MAX))
            .u32(flags)
            .u32(index)
            .u32(if has_areas { FIRST_CAPABILITY } else { 0 })
            .u64(self.size)
            .u64(self.file_offset);
        if !has_areas {
            return fixed.into_bytes();
        }
        let count = u32::try_from(self.areas.len()).unwrap_or(u32::MAX);
        let head = fixed.u16(SPARSE_MMAP).u16(1).u32(0).u32(count).u32(0);
        self.areas.iter().fold(head, |body, area| body.u64(area.offset).u64(area.size)).into_bytes()
    }

    /// Parses the reply for region `index`.
    pub(crate) fn parse(body: &[u8], index: u32) -> Result<Self, Violation> {
        let refuse = |expected| Violation::Body {
            command: Command::DeviceGetRegionInfo,
            found: body.len(),
            expected,
        };
        let short = || refuse("32 bytes, and the capabilities that they name");
        let mut reader = BodyReader(body);
        let mut next = || reader.u32().ok_or_else(short);
        let (_, flags, found, first) = (next()?, next()?, next()?, next()?);
        let size = reader.u64().ok_or_else(short)?;
        let file_offset = reader.u64().ok_or_else(short)?;
        if found != index {
            return Err(region_field_violation(
                "index",
                found.into(),
                "the region that was asked about",
            ));
        }
        let sparse =
            if flags & CAPS != 0 && first != 0 { sparse_mmap_areas(body, first)? } else { None };
        let is_mappable = flags & MMAP != 0;
        let areas = match sparse {
            _ if !is_mappable => Vec::new(),
            None => vec![SparseMmapArea { offset: 0, size }],
            Some(areas) => areas,
        };
        let is_inside =
            |area: &SparseMmapArea| area.offset.checked_add(area.size).is_some_and(|e| e <= size);
        if let Some(stray) = areas.iter().find(|area| !is_inside(area)) {
            return Err(region_field_violation(
                "area offset",
                stray.offset,
                "an area inside of the region",
            ));
        }
        let (is_readable, is_writable) = (flags & READ != 0, flags & WRITE != 0);
        Ok(Self { size, is_readable, is_writable, file_offset, areas })
    }
}

fn region_field_violation(field: &'static str, found: u64, expected: &'static str) -> Violation {
    Violation::Field { command: Command::DeviceGetRegionInfo, field, found, expected }
}

/// Follows the capability list from `first` to the sparse mmap capability.
fn sparse_mmap_areas(body: &[u8], first: u32) -> Result<Option<Vec<SparseMmapArea>>, Violation> {
    let stray =
        |at: u32| region_field_violation("cap_offset", at.into(), "a place inside of the message");
    let mut at = first;
    for _ in 0..CAPABILITIES_MAX {
        let bytes = body.get(at as usize..).filter(|_| at as usize >= INFO_BYTES);
        let mut reader = BodyReader(bytes.ok_or_else(|| stray(at))?);
        let (Some(id), Some(_), Some(next)) = (reader.u16(), reader.u16(), reader.u32()) else {
            return Err(stray(at));
        };
        if id == SPARSE_MMAP {
            let (Some(count), Some(_)) = (reader.u32(), reader.u32()) else {
                return Err(stray(at));
            };
            if count as usize > AREAS_MAX {
                return Err(region_field_violation("nr_areas", count.into(), "at most 64"));
            }
            let mut area = || Some(SparseMmapArea { offset: reader.u64()?, size: reader.u64()? });
            let areas: Option<_> = (0..count).map(|_| area()).collect();
            return areas.ok_or_else(|| stray(at)).map(Some);
        }
        if next == 0 {
            return Ok(None);
        }
        at = next;
    }
    Err(region_field_violation("next", at.into(), "a list that ends"))
}
