//! Data pointers of the owner's admin commands. Two pages fit in the command itself; larger data needs a
//! list, of which a few are reserved.

use tenmil_base::{Dma, Segment};
use tenmil_wire::Command;

use crate::data_pointer::{Cursor, DataPointerError, ListPool, SglSupport, contiguous};
use crate::error::RequestError;
use crate::queue_pair::DataPointers;

/// List memory, reserved at start: limits the number of concurrent long transfers.
#[derive(Debug)]
pub(super) struct ListPages<D: Dma> {
    dma: D,
    lists: ListPool<D>,
    pointers: SglSupport,
    is_free: [bool; LISTS],
}

/// Maximum concurrent admin commands that transfer more than two pages.
const LISTS: usize = 4;
const PAGE: u32 = 4096;

/// Maximum transfer of an admin command: one page of entries.
pub(super) const TRANSFER_BYTES_MAX: u32 = PAGE / 8 * PAGE;

impl<D: Dma> ListPages<D> {
    /// Allocates list memory for commands with this kind of data pointer.
    pub(super) fn allocate(dma: &D, pointers: SglSupport) -> Option<Self> {
        let slots = u32::try_from(LISTS).ok()?;
        let lists = ListPool::allocate(dma, slots, TRANSFER_BYTES_MAX, PAGE, pointers)?;
        Some(Self { dma: dma.clone(), lists, pointers, is_free: [true; LISTS] })
    }

    /// Sets the data pointer of `command` to `data`. Also returns the list allocated for it, if any.
    pub(super) fn set_data_pointer(
        &mut self,
        command: Command,
        data: Segment,
    ) -> Result<(Command, Option<u8>), RequestError> {
        let iova = self.dma.iova(data).ok_or(RequestError::Memory { len_bytes: data.len_bytes })?;
        if self.pointers == SglSupport::Only {
            return Ok((self.pointers.pointer(iova, data.len_bytes).put_in(command), None));
        }
        if let Some((one, two)) = contiguous(iova, data.len_bytes, u64::from(PAGE) - 1) {
            return Ok((command.with_prp(one, two), None));
        }
        let index = self.is_free.iter().position(|is_free| *is_free).ok_or(RequestError::Full)?;
        let segments = [data];
        let built = self.lists.build(index, Cursor::at(&segments, 0), data.len_bytes, 1);
        match built {
            Ok(built) if built.len_bytes == data.len_bytes => {
                self.is_free[index] = false;
                Ok((built.pointer.put_in(command), u8::try_from(index).ok()))
            }
            Ok(_) => {
                let (found, max) = (data.len_bytes.into(), TRANSFER_BYTES_MAX.into());
                Err(RequestError::OutOfRange { what: "the data's length", found, min: 1, max })
            }
            Err(DataPointerError::Alignment) => {
                let (what, found) = ("the data's offset in its dword", iova % 4);
                Err(RequestError::OutOfRange { what, found, min: 0, max: 0 })
            }
            Err(_) => Err(RequestError::Memory { len_bytes: data.len_bytes }),
        }
    }

    /// Frees the list of a completed command.
    pub(super) fn release_list(&mut self, list: Option<u8>) {
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
    use tenmil_base::{Dma, Segment};
    use tenmil_wire::sgl::Descriptor;
    use tenmil_wire::{Command, DataPointer};

    use super::{LISTS, ListPages, PAGE, TRANSFER_BYTES_MAX};
    use crate::controller::tests::memory::SharedMemory;
    use crate::data_pointer::SglSupport;
    use crate::error::RequestError;

    fn set_data_pointer(
        pages: &mut ListPages<SharedMemory>,
        data: Segment,
    ) -> Result<(u64, u64, Option<u8>), RequestError> {
        let (command, list) = pages.set_data_pointer(Command::new(2), data)?;
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
                let (prp1, prp2, list) = set_data_pointer(&mut pages, data).unwrap();
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
                pages.release_list(list);
            }
        }
    }

    #[test]
    fn a_connection_is_told_the_length_and_needs_no_list() {
        let memory = SharedMemory::default();
        let mut pages = ListPages::allocate(&memory, SglSupport::Only).unwrap();
        let data = memory.allocate(5 * PAGE).unwrap();
        for data in [data.slice(0, 4096).unwrap(), data.slice(2, 8).unwrap(), data] {
            let (command, list) = pages.set_data_pointer(Command::new(2), data).unwrap();
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
        let taken: Vec<_> =
            (0..LISTS).map(|_| set_data_pointer(&mut pages, data).unwrap().2).collect();
        assert_eq!(set_data_pointer(&mut pages, data), Err(RequestError::Full));
        pages.release_list(taken[2]);
        assert_eq!(set_data_pointer(&mut pages, data).unwrap().2, taken[2]);
    }

    #[test]
    fn data_that_is_not_dword_aligned_is_refused() {
        let memory = SharedMemory::default();
        let mut pages = ListPages::allocate(&memory, SglSupport::None).unwrap();
        let data = memory.allocate(PAGE).unwrap().slice(2, 8).unwrap();
        assert!(matches!(
            set_data_pointer(&mut pages, data),
            Err(RequestError::OutOfRange { found: 2, .. })
        ));
    }

    #[test]
    fn a_transfer_past_what_one_list_holds_is_refused() {
        let memory = SharedMemory::default();
        let mut pages = ListPages::allocate(&memory, SglSupport::None).unwrap();
        let most = memory.allocate(TRANSFER_BYTES_MAX).unwrap();
        assert!(set_data_pointer(&mut pages, most).unwrap().2.is_some());
        let more = memory.allocate(TRANSFER_BYTES_MAX + 2 * PAGE).unwrap();
        assert!(matches!(set_data_pointer(&mut pages, more), Err(RequestError::OutOfRange { .. })));
    }
}
