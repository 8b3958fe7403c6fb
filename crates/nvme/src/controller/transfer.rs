//! Where the data of the owner's admin commands lie. Two pages can be said in the command itself;
//! more take a list, and there is room for a few of those at once.

use base::{Dma, Segment};
use wire::Command;

use crate::data_pointer::{Cursor, Lists, MemoryRefused, SglSupport, contiguous};
use crate::error::Refusal;

/// Room for lists, reserved at start: as many long transfers can be under way at once.
#[derive(Debug)]
pub(super) struct ListPages<D: Dma> {
    dma: D,
    lists: Lists<D>,
    pointers: SglSupport,
    is_free: [bool; LISTS],
}

/// Admin commands that move more than two pages, at once.
const LISTS: usize = 4;
const PAGE: u32 = 4096;

/// The longest transfer of an admin command: one page of entries.
pub(super) const TRANSFER_BYTES_MAX: u32 = PAGE / 8 * PAGE;

impl<D: Dma> ListPages<D> {
    /// Room for commands that point at their data as `pointers` says.
    pub(super) fn allocate(dma: &D, pointers: SglSupport) -> Option<Self> {
        let slots = u32::try_from(LISTS).ok()?;
        let lists = Lists::allocate(dma, slots, TRANSFER_BYTES_MAX, PAGE, pointers)?;
        Some(Self { dma: dma.clone(), lists, pointers, is_free: [true; LISTS] })
    }

    /// `command` with its data at `data`, and the list it took for that.
    pub(super) fn point(
        &mut self,
        command: Command,
        data: Segment,
    ) -> Result<(Command, Option<u8>), Refusal> {
        let iova = self.dma.iova(data).ok_or(Refusal::Memory { len_bytes: data.len_bytes })?;
        if self.pointers == SglSupport::Only {
            return Ok((self.pointers.pointer(iova, data.len_bytes).put_in(command), None));
        }
        if let Some((one, two)) = contiguous(iova, data.len_bytes, u64::from(PAGE) - 1) {
            return Ok((command.with_prp(one, two), None));
        }
        let index = self.is_free.iter().position(|is_free| *is_free).ok_or(Refusal::Full)?;
        let segments = [data];
        let built = self.lists.build(index, Cursor::at(&segments, 0), data.len_bytes, 1);
        match built {
            Ok(built) if built.len_bytes == data.len_bytes => {
                self.is_free[index] = false;
                Ok((built.pointer.put_in(command), u8::try_from(index).ok()))
            }
            Ok(_) => {
                let (found, max) = (data.len_bytes.into(), TRANSFER_BYTES_MAX.into());
                Err(Refusal::OutOfRange { what: "the data's length", found, min: 1, max })
            }
            Err(MemoryRefused::Alignment) => {
                let (what, found) = ("the data's offset in its dword", iova % 4);
                Err(Refusal::OutOfRange { what, found, min: 0, max: 0 })
            }
            Err(_) => Err(Refusal::Memory { len_bytes: data.len_bytes }),
        }
    }

    /// The command that took this list has ended.
    pub(super) fn give_back(&mut self, list: Option<u8>) {
        if let Some(index) = list {
            self.is_free[usize::from(index)] = true;
        }
    }

    pub(super) fn release(&self) {
        self.lists.release();
    }
}

#[cfg(test)]
mod tests {
    use base::{Dma, Segment};
    use wire::sgl::Descriptor;
    use wire::{Command, DataPointer};

    use super::{LISTS, ListPages, PAGE, TRANSFER_BYTES_MAX};
    use crate::controller::tests::memory::SharedMemory;
    use crate::data_pointer::SglSupport;
    use crate::error::Refusal;

    fn point(
        pages: &mut ListPages<SharedMemory>,
        data: Segment,
    ) -> Result<(u64, u64, Option<u8>), Refusal> {
        let (command, list) = pages.point(Command::new(2), data)?;
        Ok((command.prp1(), command.prp2(), list))
    }

    #[test]
    fn every_page_is_pointed_to_once_whatever_the_offset() {
        let memory = SharedMemory::default();
        let mut pages = ListPages::allocate(&memory, SglSupport::None).unwrap();
        let buffer = memory.allocate(8 * PAGE).unwrap();
        let base = memory.iova(buffer).unwrap();
        for offset in [0_u32, 4, 4092] {
            for len in [1, 4096 - offset, 4097 - offset, 8192 - offset, 8193 - offset, 5 * PAGE] {
                let data = buffer.slice(offset, len).unwrap();
                let (prp1, prp2, list) = point(&mut pages, data).unwrap();
                assert_eq!(prp1, base + u64::from(offset));
                let last = u64::from((offset + len - 1) / PAGE);
                let page_at = |index: u64| base + index * u64::from(PAGE);
                match last {
                    0 => assert_eq!((prp2, list), (0, None)),
                    1 => assert_eq!((prp2, list), (page_at(1), None)),
                    _ => {
                        for entry in 1..=last {
                            let mut bytes = [0; 8];
                            assert!(memory.device_load(prp2 + (entry - 1) * 8, &mut bytes));
                            assert_eq!(u64::from_le_bytes(bytes), page_at(entry), "entry {entry}");
                        }
                    }
                }
                pages.give_back(list);
            }
        }
    }

    #[test]
    fn a_connection_is_told_the_length_and_needs_no_list() {
        let memory = SharedMemory::default();
        let mut pages = ListPages::allocate(&memory, SglSupport::Only).unwrap();
        let data = memory.allocate(5 * PAGE).unwrap();
        for data in [data.slice(0, 4096).unwrap(), data.slice(2, 8).unwrap(), data] {
            let (command, list) = pages.point(Command::new(2), data).unwrap();
            assert_eq!((command.psdt(), list), (DataPointer::Sgl, None));
            let iova = memory.iova(data).unwrap();
            assert_eq!(command.sgl1(), Descriptor::data_block(iova, data.len_bytes));
        }
    }

    #[test]
    fn there_are_as_many_lists_as_reserved_and_each_comes_back() {
        let memory = SharedMemory::default();
        let mut pages = ListPages::allocate(&memory, SglSupport::None).unwrap();
        let data = memory.allocate(4 * PAGE).unwrap();
        let taken: Vec<_> = (0..LISTS).map(|_| point(&mut pages, data).unwrap().2).collect();
        assert_eq!(point(&mut pages, data), Err(Refusal::Full));
        pages.give_back(taken[2]);
        assert_eq!(point(&mut pages, data).unwrap().2, taken[2]);
    }

    #[test]
    fn data_that_is_not_dword_aligned_is_refused() {
        let memory = SharedMemory::default();
        let mut pages = ListPages::allocate(&memory, SglSupport::None).unwrap();
        let data = memory.allocate(PAGE).unwrap().slice(2, 8).unwrap();
        assert!(matches!(point(&mut pages, data), Err(Refusal::OutOfRange { found: 2, .. })));
    }

    #[test]
    fn a_transfer_past_what_one_list_holds_is_refused() {
        let memory = SharedMemory::default();
        let mut pages = ListPages::allocate(&memory, SglSupport::None).unwrap();
        let most = memory.allocate(TRANSFER_BYTES_MAX).unwrap();
        assert!(point(&mut pages, most).unwrap().2.is_some());
        let more = memory.allocate(TRANSFER_BYTES_MAX + 2 * PAGE).unwrap();
        assert!(matches!(point(&mut pages, more), Err(Refusal::OutOfRange { .. })));
    }
}
