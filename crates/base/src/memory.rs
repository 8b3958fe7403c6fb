//! Memory as plain numbers: a region, an offset, a length.
//!
//! The right to some memory travels with the root request and nowhere else. Down the stack go
//! [`Segment`]s, which are copied freely and own nothing, so that splitting, striping and mirroring
//! need no copies of the data and no count of references.

/// One contiguous stretch of memory that devices and backends may reach.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RegionId(pub u32);

/// A piece of a region.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Segment {
    /// First byte, counted from the start of the region.
    pub offset: u64,
    /// The region.
    pub region: RegionId,
    /// How many bytes.
    pub len_bytes: u32,
}

impl Segment {
    /// The part of this segment that begins `skip_bytes` in and is `len_bytes` long, if it lies
    /// inside.
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

/// Bytes behind segments.
///
/// The memory may be written by a device or a guest at any time, so nothing here ever hands out a
/// reference into it: bytes are copied in and out.
pub trait Memory: Send + Sync {
    /// Copies bytes out of `segment`. `into` is exactly as long as the segment.
    fn load(&self, segment: Segment, into: &mut [u8]) -> Result<(), NoSuchMemory>;
    /// Copies `from` into `segment`. `from` is exactly as long as the segment.
    fn store(&self, segment: Segment, from: &[u8]) -> Result<(), NoSuchMemory>;
    /// Fills `segment` with `byte`.
    fn fill(&self, segment: Segment, byte: u8) -> Result<(), NoSuchMemory>;

    /// Loads the little-endian word in the first four bytes of `segment`, which somebody else may
    /// be storing: where it is aligned, an implementation over shared memory makes this one atomic
    /// load.
    fn load_u32(&self, segment: Segment) -> Result<u32, NoSuchMemory> {
        let mut bytes = [0; 4];
        self.load(segment.slice(0, 4).ok_or(NoSuchMemory(segment))?, &mut bytes)?;
        Ok(u32::from_le_bytes(bytes))
    }

    /// Stores a little-endian word, as [`load_u32`](Self::load_u32) loads it.
    fn store_u32(&self, segment: Segment, value: u32) -> Result<(), NoSuchMemory> {
        self.store(segment.slice(0, 4).ok_or(NoSuchMemory(segment))?, &value.to_le_bytes())
    }
}

/// A segment does not lie inside a region that exists.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NoSuchMemory(pub Segment);

#[cfg(test)]
mod tests {
    use super::{RegionId, Segment};

    #[test]
    fn a_slice_lies_inside_or_is_refused() {
        let whole = Segment { region: RegionId(3), offset: 4096, len_bytes: 100 };
        assert_eq!(whole.slice(0, 100), Some(whole));
        assert_eq!(whole.slice(99, 1).map(|part| part.offset), Some(4195));
        assert_eq!(whole.slice(100, 0).map(|part| part.len_bytes), Some(0));
        assert_eq!(whole.slice(100, 1), None);
        assert_eq!(whole.slice(u32::MAX, 2), None, "a sum that overflows is outside");
    }
}
