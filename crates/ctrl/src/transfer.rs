//! Where the bytes of a command lie in the host: from PRPs or an SGL to a list of pieces.
//!
//! ```text
//!   Command ── start ──▶ Walk ── List { iova, len } ──▶ (read from the host, now or later)
//!                          ▲                                   │
//!                          └──────────── feed(bytes) ──────────┘
//!                        Walk ── Whole ──▶ Pieces ──▶ reach: segments, or a Mover that copies
//! ```
//!
//! The walk does no I/O. It says which part of a list it wants to see, sees each part once, and
//! believes nothing: lengths, offsets, types and the number of descriptors are checked, and every
//! refusal is the status that the specification has for it. Admin commands and I/O commands share
//! it.

use wire::{Command, DataPointer, Status};

mod mover;
mod prp;
mod sgl;

pub use sgl::SGLS;

pub(crate) use mover::{ACCESS_BYTES_MAX, Moved, Mover, Target};

/// A walk over the data pointer of one command.
#[derive(Debug)]
pub(crate) struct Walk {
    kind: Kind,
    /// Bytes that have no place yet.
    left: u32,
    direction: Direction,
}

/// Which way the data of a command goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Direction {
    /// The controller reads host memory.
    FromHost,
    /// The controller writes host memory.
    ToHost,
}

/// What a walk wants next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Next {
    /// To see this part of a PRP list or an SGL segment.
    List { iova: u64, len_bytes: u32 },
    /// Nothing: every byte has its place.
    Whole,
}

/// Pieces of host memory in the order of the data, neighbours merged.
#[derive(Debug)]
pub(crate) struct Pieces {
    list: Vec<Piece>,
    pieces_max: usize,
}

/// One contiguous piece.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Piece {
    pub(crate) iova: u64,
    pub(crate) len_bytes: u32,
    /// Bytes that nobody wants: an SGL bit bucket.
    pub(crate) is_bucket: bool,
}

#[derive(Debug)]
enum Kind {
    Prp(prp::List),
    Sgl(sgl::Segment),
}

/// The most bytes of a list that a walk asks for at once.
pub(crate) const LIST_BYTES_MAX: usize = 512;

impl Walk {
    /// A walk over nothing.
    pub(crate) const fn idle() -> Self {
        Self { kind: Kind::Prp(prp::List::NONE), left: 0, direction: Direction::FromHost }
    }

    /// Starts at the data pointer of `command`, which moves `len_bytes`.
    pub(crate) fn start(
        command: &Command,
        len_bytes: u32,
        direction: Direction,
        page_shift: u8,
        pieces: &mut Pieces,
    ) -> Result<(Self, Next), Status> {
        pieces.list.clear();
        let mut left = len_bytes;
        let (kind, next) = match command.psdt() {
            DataPointer::Prp => {
                let (list, next) = prp::List::start(command, &mut left, page_shift, pieces)?;
                (Kind::Prp(list), next)
            }
            DataPointer::Sgl => {
                let (segment, next) =
                    sgl::Segment::start(command.sgl1(), &mut left, direction, pieces)?;
                (Kind::Sgl(segment), next)
            }
            // MPTR as an SGL is not offered (SGLS bit 19), and 11b is reserved.
            DataPointer::SglAndMetadataSgl | DataPointer::Reserved => {
                return Err(Status::INVALID_FIELD.with_dnr());
            }
        };
        Ok((Self { kind, left, direction }, next))
    }

    /// Takes the part of the list that was asked for.
    pub(crate) fn feed(&mut self, list: &[u8], pieces: &mut Pieces) -> Result<Next, Status> {
        match &mut self.kind {
            Kind::Prp(state) => state.feed(list, &mut self.left, pieces),
            Kind::Sgl(state) => state.feed(list, &mut self.left, self.direction, pieces),
        }
    }
}

impl Pieces {
    /// An empty list for at most `pieces_max` pieces. It has room for as many as it ever had.
    pub(crate) fn at_most(pieces_max: usize) -> Self {
        Self { list: Vec::new(), pieces_max }
    }

    /// The pieces.
    pub(crate) fn as_slice(&self) -> &[Piece] {
        &self.list
    }

    /// Forgets the pieces.
    pub(crate) fn clear(&mut self) {
        self.list.clear();
    }

    /// Appends bytes, or lengthens the last piece if they follow it.
    fn push(&mut self, iova: u64, len_bytes: u32) -> Result<(), Status> {
        // An address space does not wrap: the piece cannot be reached, whatever the host maps.
        if iova.checked_add(u64::from(len_bytes)).is_none() {
            return Err(Status::DATA_TRANSFER_ERROR);
        }
        if let Some(last) = self.list.last_mut()
            && !last.is_bucket
            && last.iova + u64::from(last.len_bytes) == iova
        {
            last.len_bytes += len_bytes;
            return Ok(());
        }
        self.append(Piece { iova, len_bytes, is_bucket: false })
    }

    fn push_bucket(&mut self, len_bytes: u32) -> Result<(), Status> {
        self.append(Piece { iova: 0, len_bytes, is_bucket: true })
    }

    fn append(&mut self, piece: Piece) -> Result<(), Status> {
        if self.list.len() == self.pieces_max {
            return Err(Status::INVALID_SGL_DESCRIPTOR_COUNT.with_dnr());
        }
        self.list.push(piece);
        Ok(())
    }
}

/// The 64-bit words of a list.
fn words(list: &[u8]) -> impl Iterator<Item = u64> + '_ {
    list.as_chunks::<8>().0.iter().map(|bytes| u64::from_le_bytes(*bytes))
}

#[cfg(test)]
pub(crate) mod tests {
    use super::{Direction, LIST_BYTES_MAX, Next, Piece, Pieces, Walk};
    use wire::{Command, Status};

    /// Walks to the end over a host memory that begins at address zero.
    pub(crate) fn walk(
        command: &Command,
        total_bytes: u32,
        direction: Direction,
        memory: &[u8],
    ) -> Result<Vec<Piece>, Status> {
        let mut pieces = Pieces::at_most(300);
        let (mut walk, mut next) = Walk::start(command, total_bytes, direction, 12, &mut pieces)?;
        for _ in 0..10_000 {
            let Next::List { iova, len_bytes } = next else {
                let placed: u32 = pieces.as_slice().iter().map(|piece| piece.len_bytes).sum();
                assert_eq!(placed, total_bytes, "every byte has one place");
                return Ok(pieces.as_slice().to_vec());
            };
            assert!(len_bytes as usize <= LIST_BYTES_MAX && len_bytes > 0);
            let start = usize::try_from(iova).unwrap();
            let list =
                memory.get(start..start + len_bytes as usize).ok_or(Status::DATA_TRANSFER_ERROR)?;
            next = walk.feed(list, &mut pieces)?;
        }
        panic!("the walk does not end");
    }

    pub(crate) fn piece(iova: u64, len_bytes: u32) -> Piece {
        Piece { iova, len_bytes, is_bucket: false }
    }

    #[test]
    fn a_reserved_data_pointer_type_is_an_invalid_field() {
        for psdt in [wire::DataPointer::SglAndMetadataSgl, wire::DataPointer::Reserved] {
            let command = Command::new(2).with_psdt(psdt);
            assert_eq!(
                walk(&command, 512, Direction::ToHost, &[]),
                Err(Status::INVALID_FIELD.with_dnr())
            );
        }
    }

    #[test]
    fn pieces_that_touch_become_one_and_a_sum_that_wraps_is_refused() {
        let mut pieces = Pieces::at_most(2);
        pieces.push(0x1000, 0x1000).unwrap();
        pieces.push(0x2000, 0x10).unwrap();
        pieces.push(0x4000, 0x10).unwrap();
        assert_eq!(pieces.as_slice(), [piece(0x1000, 0x1010), piece(0x4000, 0x10)]);
        assert_eq!(pieces.push(u64::MAX - 1, 4), Err(Status::DATA_TRANSFER_ERROR));
        assert_eq!(pieces.push(0, 4), Err(Status::INVALID_SGL_DESCRIPTOR_COUNT.with_dnr()));
    }
}
