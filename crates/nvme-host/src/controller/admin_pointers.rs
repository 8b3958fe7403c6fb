//! Data pointers of admin commands. Contiguous data within two pages need no list; a few lists are
//! reserved for larger data.

use tenmil_base::Segment;

use crate::data_pointer::{DataPointerError, SegmentListCursor};
use crate::error::RequestError;
use crate::queue_pair::DataPointers;

/// Data pointers of admin commands, with lists that were reserved at start: they limit the number of
/// concurrent long transfers.
#[derive(Debug)]
pub(super) struct AdminPointers<P> {
    pointers: P,
    is_free: [bool; LISTS as usize],
}

/// Maximum concurrent admin commands whose data need a list.
pub(super) const LISTS: u32 = 4;
/// Page size of the lists.
pub(super) const PAGE: u32 = 4096;

/// Maximum transfer of an admin command: one page of entries.
pub(super) const TRANSFER_BYTES_MAX: u32 = PAGE / 8 * PAGE;

impl<P: DataPointers> AdminPointers<P> {
    /// Data pointers by `pointers`, which has memory for [`LISTS`] lists.
    pub(super) fn new(pointers: P) -> Self {
        Self { pointers, is_free: [true; LISTS as usize] }
    }

    /// Data pointer to memory of the driver that lies within a page.
    pub(super) fn within_page(&self, data: Segment) -> P::Pointer {
        let pointer = self.pointers.pointer_to_contiguous(data);
        pointer.expect("memory of the driver, within a page, needs no list")
    }

    /// Data pointer to `data`. Also returns the list reserved for it, if any.
    pub(super) fn build(
        &mut self,
        data: Segment,
    ) -> Result<(P::Pointer, Option<u8>), RequestError> {
        if let Some(pointer) = self.pointers.pointer_to_contiguous(data) {
            return Ok((pointer, None));
        }
        let index = self.is_free.iter().position(|is_free| *is_free).ok_or(RequestError::Full)?;
        let segments = [data];
        let built =
            self.pointers.build(index, SegmentListCursor::at(&segments, 0), data.len_bytes, 1);
        match built {
            Ok(built) if built.len_bytes == data.len_bytes => {
                self.is_free[index] = false;
                Ok((built.pointer, u8::try_from(index).ok()))
            }
            Ok(_) => {
                let (found, max) = (data.len_bytes.into(), TRANSFER_BYTES_MAX.into());
                Err(RequestError::OutOfRange { what: "the data's length", found, min: 1, max })
            }
            Err(DataPointerError::Alignment) => {
                let (what, found) = ("the data's offset in its dword", data.offset % 4);
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
        self.pointers.release();
    }
}

#[cfg(test)]
mod tests {
    use tenmil_base::{Dma, Segment};
    use tenmil_wire::Command;

    use super::{AdminPointers, LISTS, PAGE, TRANSFER_BYTES_MAX};
    use crate::controller::tests::shared_memory::SharedMemory;
    use crate::data_pointer::{ListPool, SglSupport};
    use crate::error::RequestError;

    type Pointers = AdminPointers<ListPool<SharedMemory>>;

    fn admin_pointers(memory: &SharedMemory) -> Pointers {
        let lists = ListPool::allocate(memory, LISTS, TRANSFER_BYTES_MAX, PAGE, SglSupport::None);
        AdminPointers::new(lists.unwrap())
    }

    fn set_data_pointer(
        pointers: &mut Pointers,
        data: Segment,
    ) -> Result<(u64, u64, Option<u8>), RequestError> {
        let (pointer, list) = pointers.build(data)?;
        let command = pointer.store_in(Command::new(2));
        Ok((command.prp1(), command.prp2(), list))
    }

    #[test]
    fn every_page_is_referenced_once_at_every_offset() {
        let memory = SharedMemory::default();
        let mut pages = admin_pointers(&memory);
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
    fn prp_lists_are_limited_to_the_reserved_count_and_released() {
        let memory = SharedMemory::default();
        let mut pages = admin_pointers(&memory);
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
        let mut pages = admin_pointers(&memory);
        let data = memory.allocate(PAGE).unwrap().slice(2, 8).unwrap();
        assert!(matches!(
            set_data_pointer(&mut pages, data),
            Err(RequestError::OutOfRange { found: 2, .. })
        ));
    }

    #[test]
    fn transfer_longer_than_one_list_is_rejected() {
        let memory = SharedMemory::default();
        let mut pages = admin_pointers(&memory);
        let most = memory.allocate(TRANSFER_BYTES_MAX).unwrap();
        assert!(set_data_pointer(&mut pages, most).unwrap().2.is_some());
        let more = memory.allocate(TRANSFER_BYTES_MAX + 2 * PAGE).unwrap();
        assert!(matches!(set_data_pointer(&mut pages, more), Err(RequestError::OutOfRange { .. })));
    }
}
