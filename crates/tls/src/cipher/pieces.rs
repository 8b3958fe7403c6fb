//! Memory of one send or receive: bytes and segments, in order, on the caller's stack.

use std::marker::PhantomData;
use std::mem::MaybeUninit;
use std::ptr::NonNull;

use tenmil_base::{InvalidSegment, Segment, SendSlice};
use tenmil_dma::RegionTable;

/// Plaintext of one send. Borrows everything that it names, and passes it once.
pub(crate) struct GatherList<'a> {
    pieces: Pieces,
    borrowed: PhantomData<&'a [u8]>,
}

/// Destination of one receive. Borrows everything that it names, bytes for writing, and fills it once.
pub(crate) struct ScatterList<'a> {
    pieces: Pieces,
    borrowed: PhantomData<&'a mut [u8]>,
}

/// Address and length, with the position up to which they have been used.
struct Pieces {
    list: [MaybeUninit<Piece>; PIECES_MAX],
    count: usize,
    /// First piece that was not used up, and the number of bytes of it that were used.
    at: usize,
    offset: usize,
    /// Bytes that were not used.
    left_bytes: usize,
}

#[derive(Clone, Copy)]
pub(super) struct Piece {
    pub(super) address: NonNull<u8>,
    pub(super) len_bytes: usize,
}

/// Largest number of pieces. What does not fit is a matter of the next call.
const PIECES_MAX: usize = 256;

impl<'a> GatherList<'a> {
    pub(crate) const fn new() -> Self {
        Self { pieces: Pieces::new(), borrowed: PhantomData }
    }

    /// Adds slices, as many as fit and up to `max_bytes` in all. An error is a segment without an
    /// address in this process; what is before it was added.
    ///
    /// # Panics
    ///
    /// If a slice is outside the headers.
    pub(crate) fn add_all(
        &mut self,
        regions: &'a RegionTable,
        headers: &'a [u8],
        slices: &[SendSlice],
        max_bytes: usize,
    ) -> Result<(), InvalidSegment> {
        for slice in slices {
            let space = max_bytes - self.pieces.left_bytes;
            if space == 0 || self.pieces.is_full() {
                break;
            }
            match *slice {
                SendSlice::Headers { at, len_bytes } => {
                    let bytes = &headers[at as usize..][..len_bytes as usize];
                    self.add_bytes(&bytes[..bytes.len().min(space)]);
                }
                SendSlice::Memory(segment) => {
                    let address = regions.host_address(segment)?;
                    self.pieces.add(address, (segment.len_bytes as usize).min(space));
                }
            }
        }
        Ok(())
    }

    /// Adds bytes, if they fit.
    pub(crate) fn add_bytes(&mut self, bytes: &'a [u8]) {
        self.pieces.add(NonNull::from(bytes).cast(), bytes.len());
    }

    /// Number of bytes that were not passed.
    pub(crate) const fn left_bytes(&self) -> usize {
        self.pieces.left_bytes
    }

    /// Next piece, of at most `max_bytes`, which counts as passed. Its memory can be read as long as the
    /// list exists; others may change it meanwhile.
    pub(super) fn pass(&mut self, max_bytes: usize) -> Option<Piece> {
        let piece = self.pieces.unused().next()?;
        let len_bytes = piece.len_bytes.min(max_bytes);
        self.pieces.skip(len_bytes);
        Some(Piece { len_bytes, ..piece })
    }
}

impl<'a> ScatterList<'a> {
    pub(crate) const fn new() -> Self {
        Self { pieces: Pieces::new(), borrowed: PhantomData }
    }

    /// Adds bytes, if they fit.
    pub(crate) fn add_bytes(&mut self, bytes: &'a mut [u8]) {
        let len_bytes = bytes.len();
        self.pieces.add(NonNull::from(bytes).cast(), len_bytes);
    }

    /// Adds segments, as many as fit. An error is a segment without an address in this process; what is
    /// before it was added.
    pub(crate) fn add_segments(
        &mut self,
        regions: &'a RegionTable,
        segments: &[Segment],
    ) -> Result<(), InvalidSegment> {
        for segment in segments {
            self.pieces.add(regions.host_address(*segment)?, segment.len_bytes as usize);
        }
        Ok(())
    }

    /// Number of bytes that were not filled.
    pub(crate) const fn left_bytes(&self) -> usize {
        self.pieces.left_bytes
    }

    /// Fills the next bytes with those of `bytes` that fit, and returns their number.
    pub(crate) fn fill(&mut self, bytes: &[u8]) -> usize {
        let count = bytes.len().min(self.pieces.left_bytes);
        let mut rest = &bytes[..count];
        for piece in self.pieces.unused() {
            let (now, later) = rest.split_at(piece.len_bytes.min(rest.len()));
            if now.is_empty() {
                break;
            }
            // SAFETY: the piece is memory that the list has borrowed for writing, or a segment that it has
            // resolved, of at least this length; `now` is a slice of the caller's, which is neither.
            unsafe { piece.address.copy_from_nonoverlapping(NonNull::from(now).cast(), now.len()) };
            rest = later;
        }
        self.pieces.skip(count);
        count
    }

    /// The next `count` bytes as pieces, which do not count as filled.
    pub(super) fn next_pieces(&self, count: usize) -> impl Iterator<Item = Piece> {
        let mut left = count;
        self.pieces.unused().map_while(move |piece| {
            let len_bytes = piece.len_bytes.min(left);
            left -= len_bytes;
            (len_bytes > 0).then_some(Piece { len_bytes, ..piece })
        })
    }

    /// Overwrites the next `count` bytes, which do not count as filled.
    #[cold]
    pub(crate) fn overwrite_next(&mut self, count: usize) {
        for piece in self.next_pieces(count) {
            // SAFETY: as in `fill`.
            unsafe { piece.address.write_bytes(0, piece.len_bytes) };
        }
    }

    /// Counts the next `count` bytes as filled.
    pub(crate) fn mark_filled(&mut self, count: usize) {
        self.pieces.skip(count);
    }
}

impl Pieces {
    const fn new() -> Self {
        let list = [const { MaybeUninit::uninit() }; PIECES_MAX];
        Self { list, count: 0, at: 0, offset: 0, left_bytes: 0 }
    }

    const fn is_full(&self) -> bool {
        self.count == PIECES_MAX
    }

    fn add(&mut self, address: NonNull<u8>, len_bytes: usize) {
        if len_bytes == 0 {
            return;
        }
        if let Some(entry) = self.list.get_mut(self.count) {
            entry.write(Piece { address, len_bytes });
            self.count += 1;
            self.left_bytes += len_bytes;
        }
    }

    /// Pieces that are not used up, the first one without its used bytes.
    fn unused(&self) -> impl Iterator<Item = Piece> {
        let mut offset = self.offset;
        self.list[self.at..self.count].iter().map(move |entry| {
            // SAFETY: the first `count` entries were written by `add`.
            let Piece { address, len_bytes } = unsafe { entry.assume_init_read() };
            let used = std::mem::take(&mut offset);
            // SAFETY: `skip` keeps the offset below the length of the first piece.
            Piece { address: unsafe { address.add(used) }, len_bytes: len_bytes - used }
        })
    }

    /// Uses up `count` bytes, of which there are as many.
    fn skip(&mut self, count: usize) {
        let mut left = count.min(self.left_bytes);
        self.left_bytes -= left;
        while left > 0 {
            let Some(piece) = self.unused().next() else { return };
            if left < piece.len_bytes {
                self.offset += left;
                return;
            }
            left -= piece.len_bytes;
            (self.at, self.offset) = (self.at + 1, 0);
        }
    }
}

/// First segment of `slices`, if they begin with one.
pub(crate) fn first_segment(slices: &[SendSlice]) -> Option<Segment> {
    match slices.iter().find(|slice| slice.len_bytes() > 0)? {
        SendSlice::Memory(segment) => Some(*segment),
        SendSlice::Headers { .. } => None,
    }
}
