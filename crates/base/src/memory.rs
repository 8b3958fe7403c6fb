//! Memory addressed by numbers: region, offset, length.
//!
//! Ownership of memory belongs to the submitter of a request. Lower layers receive [`Segment`]s,
//! which are copied freely and own nothing, so splitting, striping and mirroring need neither
//! copies of the data nor reference counts.

/// Contiguous memory accessible by devices and I/O channels.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RegionId(pub u32);

/// Part of a region.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Segment {
    /// First byte, relative to the start of the region.
    pub offset: u64,
    /// The region.
    pub region: RegionId,
    /// Length in bytes.
    pub len_bytes: u32,
}

impl Segment {
    /// Part of this segment from `skip_bytes` on, `len_bytes` long, if it is inside.
    pub const fn slice(self, skip_bytes: u32, len_bytes: u32) -> Option<Self> {
        match skip_bytes.checked_add(len_bytes) {
            Some(end) if end <= self.len_bytes => Some(Self {
                offset: self.offset + skip_bytes as u64,
                region: self.region,
                len_bytes,
            }),
            _ => None,
        }
    }
}

/// Access to the bytes of segments.
///
/// A device or a remote host may write the memory at any time, so no reference into it is ever
/// handed out: bytes are copied in and out.
pub trait Memory: Send + Sync {
    /// Copies bytes out of `segment`. `into` has exactly the length of the segment.
    fn load(&self, segment: Segment, into: &mut [u8]) -> Result<(), InvalidSegment>;
    /// Copies `from` into `segment`. `from` has exactly the length of the segment.
    fn store(&self, segment: Segment, from: &[u8]) -> Result<(), InvalidSegment>;
    /// Fills `segment` with `byte`.
    fn fill(&self, segment: Segment, byte: u8) -> Result<(), InvalidSegment>;

    /// Loads the little-endian word in the first four bytes of `segment`, which may be stored
    /// concurrently: if it is aligned, an implementation on shared memory makes this one atomic
    /// load.
    fn load_u32(&self, segment: Segment) -> Result<u32, InvalidSegment> {
        let mut bytes = [0; 4];
        self.load(segment.slice(0, 4).ok_or(InvalidSegment(segment))?, &mut bytes)?;
        Ok(u32::from_le_bytes(bytes))
    }

    /// Stores a little-endian word, with the same atomicity as [`load_u32`](Self::load_u32).
    fn store_u32(&self, segment: Segment, value: u32) -> Result<(), InvalidSegment> {
        self.store(segment.slice(0, 4).ok_or(InvalidSegment(segment))?, &value.to_le_bytes())
    }
}

/// A segment is not inside an existing region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InvalidSegment(pub Segment);

#[cfg(test)]
mod tests {
    use super::{RegionId, Segment};

    #[test]
    fn slice_outside_of_its_segment_is_rejected() {
        let whole = Segment { region: RegionId(3), offset: 4096, len_bytes: 100 };
        assert_eq!(whole.slice(0, 100), Some(whole));
        assert_eq!(whole.slice(99, 1).map(|part| part.offset), Some(4195));
        assert_eq!(whole.slice(100, 0).map(|part| part.len_bytes), Some(0));
        assert_eq!(whole.slice(100, 1), None);
        assert_eq!(whole.slice(u32::MAX, 2), None, "a sum that overflows is outside");
    }
}
