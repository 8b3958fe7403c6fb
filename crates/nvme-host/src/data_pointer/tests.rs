use tenmil_base::{RegionId, Segment};
use tenmil_wire::Command;
use tenmil_wire::sgl::Descriptor;

use super::{
    BuiltDataPointer, DataPointerError, ListPool, Pointer, SegmentListCursor, SglSupport,
    contiguous_prps,
};
use crate::fake_device::{FakeDma, byte_addresses};
use crate::queue_pair::DataPointers;

/// Pages this small allow an exhaustive test. A list has two entries or one descriptor.
const PAGE: u32 = 16;
const LISTED_MAX: usize = 2;

fn list_pool(dma: &FakeDma, page_bytes: u32, sgl: SglSupport) -> ListPool<FakeDma> {
    ListPool::allocate(dma, 4, 1 << 20, page_bytes, sgl).unwrap()
}

fn pointer_addresses(dma: &FakeDma, built: BuiltDataPointer<Pointer>, page_bytes: u32) -> Vec<u64> {
    let command = built.pointer.store_in(Command::new(0x02));
    dma.data_pointer_addresses(&command, u64::from(built.len_bytes), u64::from(page_bytes))
}

fn segment(region: u32, offset: u64, len_bytes: u32) -> Segment {
    Segment { region: RegionId(region), offset, len_bytes }
}

/// Number of bytes that PRP entries can describe: byte by byte.
fn prp_bytes_max(addresses: &[u64], page: u64, granule: u32, listed_max: usize) -> usize {
    let mut listed = 0;
    let mut count = 0;
    for (index, address) in addresses.iter().enumerate() {
        if index == 0 {
            if address % 4 != 0 {
                return 0;
            }
        } else {
            let previous = addresses[index - 1];
            let breaks = *address != previous + 1;
            if breaks && (!address.is_multiple_of(page) || !(previous + 1).is_multiple_of(page)) {
                break;
            }
            listed += usize::from(address % page == 0);
            if listed > listed_max {
                break;
            }
        }
        count = index + 1;
    }
    count - count % granule as usize
}

fn check_prp(dma: &FakeDma, lists: &mut ListPool<FakeDma>, segments: &[Segment]) {
    let all = byte_addresses(segments);
    let wanted = u32::try_from(all.len()).unwrap();
    for granule in [1, 4, 8, 32].into_iter().filter(|granule| wanted % granule == 0) {
        let expected = prp_bytes_max(&all, u64::from(PAGE), granule, LISTED_MAX);
        let built = lists.build(1, SegmentListCursor::at(segments, 0), wanted, granule);
        if expected == 0 {
            assert_eq!(built, Err(DataPointerError::Alignment), "{segments:?} by {granule}");
            continue;
        }
        let built = built.unwrap_or_else(|refused| panic!("{refused:?} for {segments:?}"));
        assert_eq!(built.len_bytes as usize, expected, "{segments:?} by {granule}");
        let found = pointer_addresses(dma, built, PAGE);
        assert_eq!(found, all[..expected], "{segments:?} by {granule}");
    }
}

#[test]
fn prp_entries_of_one_segment_are_right_at_every_offset_and_length() {
    let dma = FakeDma::new(4);
    let mut lists = list_pool(&dma, PAGE, SglSupport::None);
    for offset in 0..u64::from(PAGE) {
        for len_bytes in 1..=5 * PAGE {
            check_prp(&dma, &mut lists, &[segment(1, 64 + offset, len_bytes)]);
        }
    }
}

#[test]
fn prp_entries_of_scattered_segments_are_right_or_end_where_they_must() {
    let dma = FakeDma::new(4);
    let mut lists = list_pool(&dma, PAGE, SglSupport::None);
    let offsets = [0, 2, 4, 8, 12];
    let lens = [0, 1, 4, 8, 12, 14, 16, 20, 24, 28, 32, 36];
    let all = || offsets.into_iter().flat_map(|offset| lens.map(|len| (offset, len)));
    for first in all() {
        for second in all() {
            if first.1 + second.1 > 0 {
                let first = segment(1, first.0, first.1);
                check_prp(&dma, &mut lists, &[first, segment(2, 64 + second.0, second.1)]);
                // The same with the second segment directly after the first.
                let behind = first.offset + u64::from(first.len_bytes);
                check_prp(&dma, &mut lists, &[first, segment(1, behind, second.1)]);
            }
        }
    }
    let few = || [0, 8].into_iter().flat_map(|offset| [8, 16, 24, 32].map(|len| (offset, len)));
    for (a, b, c) in few().flat_map(|a| few().flat_map(move |b| few().map(move |c| (a, b, c)))) {
        let parts = [(1, a), (2, b), (3, c)];
        let segments = parts.map(|(region, (offset, len))| segment(region, offset, len));
        check_prp(&dma, &mut lists, &segments);
    }
}

/// Number of bytes that one SGL can describe; `None` if the controller requires a larger alignment.
fn sgl_bytes_max(
    addresses: &[u64],
    support: SglSupport,
    most: usize,
    granule: u32,
) -> Option<usize> {
    let runs: Vec<&[u64]> = addresses.chunk_by(|one, next| *next == one + 1).take(most).collect();
    let aligned = |run: &&[u64]| run[0].is_multiple_of(4) && run.len().is_multiple_of(4);
    let total: usize = runs.iter().map(|run| run.len()).sum();
    let total = total - total % granule as usize;
    (total > 0 && (support == SglSupport::Any || runs.iter().all(aligned))).then_some(total)
}

#[test]
fn sgl_describes_data_that_prp_entries_cannot() {
    let dma = FakeDma::new(4);
    let all = || {
        let offsets = [0, 1, 4, 60].into_iter();
        offsets.flat_map(|offset| [0, 3, 4, 8, 60, 64, 200].map(|len| (offset, len)))
    };
    // A list of 16 bytes has one descriptor, one of 64 bytes has four.
    for (page, descriptors_max) in [(PAGE, 1), (64, 4)] {
        for support in [SglSupport::Any, SglSupport::DwordAligned] {
            let mut lists = list_pool(&dma, page, support);
            for (a, b) in all().flat_map(|a| all().map(move |b| (a, b))).filter(|it| it.0.1 > 0) {
                let parts = [(1, a), (2, b), (3, a)];
                let segments = parts.map(|(region, (offset, len))| segment(region, offset, len));
                let bytes = byte_addresses(&segments);
                let wanted = u32::try_from(bytes.len()).unwrap();
                for granule in [1, 4, 32].into_iter().filter(|granule| wanted % granule == 0) {
                    let by_prp = prp_bytes_max(&bytes, u64::from(page), granule, page as usize / 8);
                    let by_sgl = sgl_bytes_max(&bytes, support, descriptors_max, granule);
                    let is_short = wanted <= 2 * page
                        && prp_bytes_max(&bytes, u64::from(page), granule, 1) == bytes.len();
                    let expected = if is_short { by_prp } else { by_sgl.unwrap_or(by_prp) };

                    let built =
                        lists.build(0, SegmentListCursor::at(&segments, 0), wanted, granule);
                    let Ok(built) = built else {
                        assert_eq!(expected, 0, "{segments:?} by {granule}");
                        continue;
                    };
                    let found = pointer_addresses(&dma, built, page);
                    assert_eq!(found, bytes[..expected], "{segments:?} by {granule}");
                }
            }
        }
    }
}

#[test]
fn one_long_piece_is_one_descriptor_and_no_list() {
    let dma = FakeDma::new(8);
    let mut lists = list_pool(&dma, 4096, SglSupport::Any);
    let long = [segment(1, 100, 1 << 20)];
    let built = lists.build(0, SegmentListCursor::at(&long, 0), 1 << 20, 512).unwrap();
    let expected = Descriptor::data_block((2 << 32) + 100, 1 << 20);
    assert_eq!(built, BuiltDataPointer { pointer: Pointer::Sgl(expected), len_bytes: 1 << 20 });
}

#[test]
fn two_pages_need_no_list_even_where_an_sgl_would_do() {
    let dma = FakeDma::new(8);
    let mut lists = list_pool(&dma, 4096, SglSupport::Any);
    let pages = [segment(1, 4096, 4096), segment(2, 0, 4096)];
    let built = lists.build(0, SegmentListCursor::at(&pages, 0), 8192, 512).unwrap();
    let expected = Pointer::Prp((2 << 32) + 4096, 3 << 32);
    assert_eq!(built, BuiltDataPointer { pointer: expected, len_bytes: 8192 });
}

#[test]
fn fast_and_general_paths_build_the_same_pointer() {
    let dma = FakeDma::new(4);
    let mut lists = list_pool(&dma, PAGE, SglSupport::None);
    let mask = u64::from(PAGE) - 1;
    for offset in 0..2 * u64::from(PAGE) {
        for len_bytes in 1..=3 * PAGE {
            let segments = [segment(1, offset, len_bytes)];
            let slowly = lists.build_prp(0, SegmentListCursor::at(&segments, 0), len_bytes, 1);
            let quickly = contiguous_prps((2 << 32) + offset, len_bytes, mask);
            match (quickly, slowly) {
                (Some((one, two)), slowly) => {
                    let pointer = Pointer::Prp(one, two);
                    assert_eq!(slowly, Ok(BuiltDataPointer { pointer, len_bytes }));
                }
                (None, Err(refused)) => {
                    assert!(offset % 4 != 0 && refused == DataPointerError::Alignment);
                }
                (None, Ok(_)) => assert!(offset % u64::from(PAGE) + u64::from(len_bytes) > 32),
            }
        }
    }
}

#[test]
fn list_is_in_the_memory_of_its_slot() {
    let dma = FakeDma::new(8);
    let mut lists = list_pool(&dma, 4096, SglSupport::None);
    let long = [segment(1, 0, 5 * 4096)];
    let second = |lists: &mut ListPool<FakeDma>, index| match lists
        .build(index, SegmentListCursor::at(&long, 0), 5 * 4096, 512)
        .unwrap()
        .pointer
    {
        Pointer::Prp(_, second) => second,
        other => panic!("{other:?}, expected PRPs"),
    };
    let places: Vec<u64> = (0..4).map(|index| second(&mut lists, index)).collect();
    let step = u64::from(lists.list_bytes);
    assert_eq!(places, [0, 1, 2, 3].map(|index| lists.iova + index * step));
    assert_eq!(lists.store(4, &[0]), Err(DataPointerError::Unreachable), "there is no fifth slot");
}

#[test]
fn missing_or_unmapped_memory_is_rejected() {
    let dma = FakeDma::new(4);
    for support in [SglSupport::None, SglSupport::Any] {
        let mut lists = list_pool(&dma, 64, support);
        let mut build = |segments: &[Segment], len| {
            lists.build(0, SegmentListCursor::at(segments, 0), len, 1).unwrap_err()
        };
        assert_eq!(build(&[], 64), DataPointerError::TooShort);
        assert_eq!(build(&[segment(1, 0, 64)], 65), DataPointerError::TooShort);
        assert_eq!(build(&[segment(100, 0, 64)], 64), DataPointerError::Unreachable);
        let second = [segment(1, 0, 64), segment(100, 0, 64)];
        assert_eq!(build(&second, 128), DataPointerError::Unreachable);
    }
}

#[test]
fn cursor_seeks_to_any_byte_of_any_segment_list() {
    let dma = FakeDma::new(1);
    let segments = [segment(1, 0, 5), segment(2, 0, 0), segment(3, 8, 7)];
    let all = byte_addresses(&segments);
    for (skip, address) in all.iter().enumerate() {
        let cursor = SegmentListCursor::at(&segments, skip as u64);
        let (piece, _) = cursor.next_piece(&dma, 100).unwrap().unwrap();
        assert_eq!(piece.iova, *address);
    }
    assert!(SegmentListCursor::at(&segments, 12).next_piece(&dma, 1).unwrap().is_none());
}

#[test]
fn metadata_is_one_dword_aligned_range() {
    let dma = FakeDma::new(1);
    let segments = [segment(1, 8, 64), segment(2, 2, 64)];
    assert_eq!(
        SegmentListCursor::at(&segments, 0).contiguous_metadata(&dma, 128),
        Ok(((2 << 32) + 8, 64))
    );
    assert_eq!(
        SegmentListCursor::at(&segments, 8).contiguous_metadata(&dma, 16),
        Ok(((2 << 32) + 16, 16))
    );
    assert_eq!(
        SegmentListCursor::at(&segments, 64).contiguous_metadata(&dma, 8),
        Err(DataPointerError::Alignment)
    );
    assert_eq!(
        SegmentListCursor::at(&segments, 128).contiguous_metadata(&dma, 8),
        Err(DataPointerError::TooShort)
    );
}
