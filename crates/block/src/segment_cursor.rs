//! Cursor over a segment list, in steps independent of segment boundaries.

use std::convert::Infallible;

use tenmil_base::Segment;

/// The rest of a segment list.
#[derive(Clone, Debug)]
pub struct SegmentCursor<'a> {
    rest: &'a [Segment],
    skip_bytes: u32,
}

impl<'a> SegmentCursor<'a> {
    /// A cursor at the start of the list.
    pub fn new(segments: &'a [Segment]) -> Self {
        Self { rest: segments, skip_bytes: 0 }
    }

    /// Takes at most `len_bytes` off the front, not beyond the end of a segment. `None` at the end of the
    /// list.
    #[inline]
    pub fn take_piece(&mut self, len_bytes: u64) -> Option<Segment> {
        loop {
            let (first, rest) = self.rest.split_first()?;
            let left = first.len_bytes - self.skip_bytes;
            if left == 0 {
                (self.rest, self.skip_bytes) = (rest, 0);
                continue;
            }
            let count = left.min(u32::try_from(len_bytes).unwrap_or(u32::MAX));
            let piece = first.slice(self.skip_bytes, count)?;
            self.skip_bytes += count;
            return Some(piece);
        }
    }

    /// Takes `len_bytes` off the front, piece by piece: `each` gets a piece and its offset from the start
    /// of this call. Stops at the first error.
    pub fn take_each_piece<E>(
        &mut self,
        len_bytes: u64,
        mut each: impl FnMut(Segment, u64) -> Result<(), E>,
    ) -> Result<(), E> {
        let mut done = 0;
        while done < len_bytes {
            let Some(piece) = self.take_piece(len_bytes - done) else { break };
            each(piece, done)?;
            done += u64::from(piece.len_bytes);
        }
        Ok(())
    }

    /// Moves `len_bytes`, or the rest if shorter, to the end of `list`.
    pub fn take_into_list(&mut self, len_bytes: u64, list: &mut Vec<Segment>) {
        let Ok(()) = self.take_each_piece(len_bytes, |piece, _| {
            list.push(piece);
            Ok::<(), Infallible>(())
        });
    }
}

#[cfg(test)]
mod tests {
    use tenmil_base::{RegionId, Segment};

    use super::SegmentCursor;

    #[test]
    fn pieces_cover_the_segments_for_any_step() {
        let segment = |offset, len_bytes| Segment { region: RegionId(0), offset, len_bytes };
        let list = [segment(0, 5), segment(100, 0), segment(200, 3), segment(300, 4)];
        let bytes: Vec<u64> = list
            .iter()
            .flat_map(|part| (0..u64::from(part.len_bytes)).map(|byte| part.offset + byte))
            .collect();
        for step in 1..=13 {
            let mut pieces = SegmentCursor::new(&list);
            let mut seen = Vec::new();
            while seen.len() < bytes.len() {
                let before = seen.len() as u64;
                let each = |piece: Segment, done| {
                    assert_eq!(done, seen.len() as u64 - before);
                    seen.extend((0..u64::from(piece.len_bytes)).map(|byte| piece.offset + byte));
                    Ok::<(), ()>(())
                };
                pieces.take_each_piece(step, each).unwrap();
            }
            assert_eq!(seen, bytes, "in steps of {step}");
            assert_eq!(pieces.take_piece(1), None);
        }
    }
}
