//! Conformance tests of every device.

mod array_comparison;
mod durability;
mod partial_accept_device;
mod power_loss_device;
mod tested_devices;
mod zeroed_crypt_device;

use tenmil_base::{
    CompletionBatch, Durability, Instant, IoStatus, Operation, Random, RegionId, RequestFlags,
    Segment, WakeSource,
};
use tenmil_linux::Sleeper;

pub(crate) use self::partial_accept_device::PartialAcceptDevice;
pub(crate) use self::power_loss_device::PowerLossDeviceType;
use self::tested_devices::{SynchronousChannel, all_devices, readable_tested_devices};

#[test]
fn random_operations_match_the_expected_contents() {
    for subject in readable_tested_devices() {
        let mut driver = subject.synchronous_channel();
        let mut blocks = ExpectedBlocks::new(64);
        let mut random = Random::new(1);
        for round in 0..400 {
            let (first, count) = blocks.random_range(&mut random);
            let (other, _) = blocks.random_range(&mut random);
            let source = other.min(64 - u64::from(count));
            match random.below(8) {
                0..=2 => {
                    let byte = u8::try_from(random.below(255) + 1).unwrap();
                    let flags =
                        if random.chance(1, 4) { RequestFlags::FUA } else { RequestFlags::NONE };
                    assert_eq!(driver.write(first, count, byte, flags), IoStatus::SUCCESS);
                    blocks.set_state(first, count, ExpectedState::Holds(byte));
                }
                3 if driver.supports(Operation::WriteZeroes) => {
                    let flags = if random.chance(1, 2) {
                        RequestFlags::DEALLOCATE
                    } else {
                        RequestFlags::FUA
                    };
                    driver.run_expecting_success(Operation::WriteZeroes, first, count, flags);
                    blocks.set_state(first, count, ExpectedState::Holds(0));
                }
                4 if driver.supports(Operation::Deallocate) => {
                    driver.run_expecting_success(
                        Operation::Deallocate,
                        first,
                        count,
                        RequestFlags::NONE,
                    );
                    blocks.apply_deallocate(first, count, subject.is_ciphered);
                }
                5 if driver.supports(Operation::Copy) => {
                    let status = driver.copy(source, first, count);
                    blocks.apply_copy(source, first, count, status);
                    if !status.is_success() {
                        // How far it got before the unreadable block is undefined.
                        assert_eq!(
                            driver.write(first, count, 9, RequestFlags::NONE),
                            IoStatus::SUCCESS
                        );
                        blocks.set_state(first, count, ExpectedState::Holds(9));
                    }
                }
                6 if driver.supports(Operation::WriteUncorrectable) => {
                    driver.run_expecting_success(
                        Operation::WriteUncorrectable,
                        first,
                        count,
                        RequestFlags::NONE,
                    );
                    blocks.set_state(first, count, ExpectedState::Lost);
                }
                _ => blocks.read_and_check(&mut driver, first, count, round),
            }
        }
        // Not every device accepts so many blocks at once.
        blocks.read_and_check(&mut driver, 0, 32, 400);
        blocks.read_and_check(&mut driver, 32, 32, 400);
    }
}

/// Contents of a block, as far as they are determined.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ExpectedState {
    Holds(u8),
    /// Deallocated: zeroes, or still this byte.
    Free(u8),
    /// Deallocated under a cipher: the plaintext of zeroes is unknown.
    Scrambled,
    Lost,
}

struct ExpectedBlocks(Vec<ExpectedState>);

impl ExpectedBlocks {
    fn new(count: usize) -> Self {
        Self(vec![ExpectedState::Holds(0); count])
    }

    fn random_range(&self, random: &mut Random) -> (u64, u32) {
        let first = random.below(self.0.len() as u64);
        let most = (self.0.len() as u64 - first).min(32);
        (first, u32::try_from(random.below(most) + 1).unwrap())
    }

    fn slice_mut(&mut self, first: u64, count: u32) -> &mut [ExpectedState] {
        let first = usize::try_from(first).unwrap();
        &mut self.0[first..first + count as usize]
    }

    fn set_state(&mut self, first: u64, count: u32, state: ExpectedState) {
        self.slice_mut(first, count).fill(state);
    }

    fn apply_deallocate(&mut self, first: u64, count: u32, is_ciphered: bool) {
        for state in self.slice_mut(first, count) {
            if let ExpectedState::Holds(byte) = *state {
                *state =
                    if is_ciphered { ExpectedState::Scrambled } else { ExpectedState::Free(byte) };
            }
        }
    }

    fn apply_copy(&mut self, source: u64, target: u64, count: u32, status: IoStatus) {
        let from = self.slice_mut(source, count).to_vec();
        if from.contains(&ExpectedState::Lost) {
            assert_eq!(status, IoStatus::UNRECOVERED_READ);
        } else {
            assert_eq!(status, IoStatus::SUCCESS);
            self.slice_mut(target, count).copy_from_slice(&from);
        }
    }

    fn read_and_check(
        &mut self,
        driver: &mut SynchronousChannel,
        first: u64,
        count: u32,
        round: usize,
    ) {
        let states = self.slice_mut(first, count).to_vec();
        let (status, bytes) = driver.read(first, count, RequestFlags::NONE);
        let verified = driver.run_request(Operation::Verify, first, count, RequestFlags::NONE);
        if states.contains(&ExpectedState::Lost) {
            assert_eq!(
                (status, verified),
                (IoStatus::UNRECOVERED_READ, IoStatus::UNRECOVERED_READ)
            );
            return;
        }
        assert_eq!((status, verified), (IoStatus::SUCCESS, IoStatus::SUCCESS));
        for (state, block) in states.iter().zip(bytes.chunks(driver.block_size())) {
            let good = match state {
                ExpectedState::Holds(byte) => block.iter().all(|found| found == byte),
                ExpectedState::Free(byte) => block.iter().all(|found| found == byte || *found == 0),
                ExpectedState::Scrambled => true,
                ExpectedState::Lost => false,
            };
            assert!(good, "{} round {round}: {state:?}, found {:?}", driver.name, &block[..8]);
        }
    }
}

#[test]
fn data_is_correct_with_random_segment_splits() {
    for subject in readable_tested_devices() {
        let mut driver = subject.synchronous_channel();
        let mut random = Random::new(2);
        let size = driver.block_size();
        for _ in 0..60 {
            let blocks = u32::try_from(random.below(8) + 1).unwrap();
            let bytes: Vec<u8> =
                (0..blocks as usize * size).map(|_| random.next_u64().to_le_bytes()[0]).collect();
            let (out, back) = (
                driver.store_in_random_segments(&bytes, &mut random),
                driver.store_in_random_segments(&bytes, &mut random),
            );
            driver.write_segments(&out, &bytes);
            assert_eq!(
                driver.run_with_segments(Operation::Write, 5, blocks, &out),
                IoStatus::SUCCESS
            );
            driver.write_segments(&back, &vec![0xee; bytes.len()]);
            assert_eq!(
                driver.run_with_segments(Operation::Read, 5, blocks, &back),
                IoStatus::SUCCESS
            );
            assert!(driver.read_segments(&back) == bytes, "{}: {out:?} {back:?}", driver.name);
            assert_eq!(
                driver.run_with_segments(Operation::Compare, 5, blocks, &back),
                IoStatus::SUCCESS
            );
        }
    }
}

#[test]
fn compare_finds_any_single_wrong_byte() {
    for subject in readable_tested_devices() {
        let mut driver = subject.synchronous_channel();
        let size = driver.block_size();
        let memory = driver.memory(4);
        assert_eq!(driver.write(8, 2, 3, RequestFlags::NONE), IoStatus::SUCCESS);
        // Blocks 10 and 11 were never written and hold zeroes.
        let mut bytes = vec![3; 2 * size];
        bytes.resize(4 * size, 0);
        driver.write_segments(&[memory], &bytes);
        assert_eq!(
            driver.run_with_segments(Operation::Compare, 8, 4, &[memory]),
            IoStatus::SUCCESS
        );
        for wrong in [0, size - 1, 2 * size - 1, 2 * size, 4 * size - 1] {
            bytes[wrong] ^= 0x80;
            driver.write_segments(&[memory], &bytes);
            let status = driver.run_with_segments(Operation::Compare, 8, 4, &[memory]);
            assert_eq!(status, IoStatus::COMPARE_FAILURE, "{} at {wrong}", driver.name);
            bytes[wrong] ^= 0x80;
        }
        assert!(
            driver.read_segments(&[memory])[..size] == bytes[..size],
            "a compare transfers nothing here"
        );
    }
}

#[test]
fn compare_and_write_is_atomic() {
    for subject in readable_tested_devices() {
        let mut driver = subject.synchronous_channel();
        let size = driver.block_size();
        let memory = driver.memory(4);
        assert_eq!(driver.write(8, 2, 3, RequestFlags::NONE), IoStatus::SUCCESS);
        let mut bytes = [vec![3; 2 * size], vec![4; 2 * size]].concat();
        let run = |driver: &mut SynchronousChannel, bytes: &[u8]| {
            driver.write_segments(&[memory], bytes);
            driver.run_with_segments(Operation::CompareAndWrite, 8, 2, &[memory])
        };
        if !driver.limits().operations.has(Operation::CompareAndWrite) {
            assert_eq!(run(&mut driver, &bytes), IoStatus::INVALID_OPCODE, "{}", driver.name);
            continue;
        }
        for (wrong, found, holds) in [
            (Some(2 * size - 1), IoStatus::COMPARE_FAILURE, 3),
            (None, IoStatus::SUCCESS, 4),
            (None, IoStatus::COMPARE_FAILURE, 4),
        ] {
            wrong.into_iter().for_each(|wrong| bytes[wrong] ^= 1);
            assert_eq!(run(&mut driver, &bytes), found, "{}", driver.name);
            wrong.into_iter().for_each(|wrong| bytes[wrong] ^= 1);
            let (_, read) = driver.read(8, 2, RequestFlags::NONE);
            assert!(read.iter().all(|byte| *byte == holds), "{} {holds}", driver.name);
        }
        let short = memory.slice(0, 2 * driver.limits().block_size).unwrap();
        let status = driver.run_with_segments(Operation::CompareAndWrite, 8, 2, &[short]);
        assert_eq!(status, IoStatus::INVALID_FIELD, "{}", driver.name);
    }
}

#[test]
fn overlapping_copy_is_correct() {
    for subject in readable_tested_devices() {
        let most = match subject.medium.limits().request_blocks_max {
            u32::MAX => 64,
            most => u64::from(most),
        };
        let mut driver = subject.synchronous_channel();
        if !driver.supports(Operation::Copy) {
            assert_eq!(driver.copy(10, 13, 1), IoStatus::INVALID_OPCODE, "{}", driver.name);
            continue;
        }
        // Longer than what a device moves at once.
        let count = u32::try_from(most + 3).unwrap();
        for (source, target) in [(10, 13), (13, 10)] {
            for block in 0..u64::from(count) + 3 {
                let byte = u8::try_from(block % 251 + 1).unwrap();
                assert_eq!(
                    driver.write(10 + block, 1, byte, RequestFlags::NONE),
                    IoStatus::SUCCESS
                );
            }
            assert_eq!(driver.copy(source, target, count), IoStatus::SUCCESS);
            for block in 0..u64::from(count) {
                let expected = u8::try_from((block + source - 10) % 251 + 1).unwrap();
                let (_, bytes) = driver.read(target + block, 1, RequestFlags::NONE);
                assert!(bytes.iter().all(|byte| *byte == expected), "{} {block}", driver.name);
            }
        }
    }
}

#[test]
fn blocks_beyond_the_end_are_out_of_range() {
    for subject in all_devices() {
        let mut driver = subject.synchronous_channel();
        let end = driver.limits().block_count;
        let memory = driver.memory(2);
        for (lba, blocks) in [(end, 1), (end - 1, 2), (u64::MAX, 1), (u64::MAX - 1, 2)] {
            for operation in Operation::ALL {
                let moves =
                    matches!(operation, Operation::Read | Operation::Write | Operation::Compare);
                let status = match operation {
                    Operation::Flush => continue,
                    _ if !driver.supports(operation) => continue,
                    _ if moves => {
                        let len_bytes = blocks * driver.limits().block_size;
                        let segment = memory.slice(0, len_bytes).unwrap();
                        driver.run_with_segments(operation, lba, blocks, &[segment])
                    }
                    _ => driver.run_request(operation, lba, blocks, RequestFlags::NONE),
                };
                assert_eq!(status, IoStatus::LBA_OUT_OF_RANGE, "{} {operation:?}", driver.name);
            }
            if driver.supports(Operation::Copy) {
                assert_eq!(driver.copy(lba, 0, blocks), IoStatus::LBA_OUT_OF_RANGE);
            }
        }
        driver.run_expecting_success(Operation::Verify, end - 1, 1, RequestFlags::NONE);
        driver.run_expecting_success(Operation::Verify, end, 0, RequestFlags::NONE);
    }
}

#[test]
fn invalid_segments_are_rejected() {
    for subject in readable_tested_devices() {
        let mut driver = subject.synchronous_channel();
        let size = driver.limits().block_size;
        let memory = driver.memory(2);
        let short = memory.slice(0, size).unwrap();
        let stray = Segment { region: RegionId(99), ..short };
        for operation in [Operation::Read, Operation::Write, Operation::Compare] {
            let mut try_with = |blocks, segments: &[Segment]| {
                driver.run_with_segments(operation, 0, blocks, segments)
            };
            assert_eq!(try_with(2, &[short]), IoStatus::INVALID_FIELD);
            assert_eq!(try_with(1, &[memory]), IoStatus::INVALID_FIELD);
            assert_eq!(try_with(1, &[]), IoStatus::INVALID_FIELD);
            assert_eq!(try_with(1, &[stray]), IoStatus::DATA_TRANSFER_ERROR, "{operation:?}");
            assert_eq!(try_with(0, &[]), IoStatus::SUCCESS);
            let most = driver.limits().request_blocks_max;
            if most < u32::MAX {
                let large = Segment { len_bytes: (most + 1) * size, ..memory };
                let status = driver.run_with_segments(operation, 0, most + 1, &[large]);
                assert_eq!(status, IoStatus::INVALID_FIELD);
            }
            let mut request = driver.request(operation, 0, 1);
            (request.segment_first, request.segment_count) = (1, 1);
            assert_eq!(driver.submit(request, &[short]), IoStatus::INVALID_FIELD);
            (request.segment_first, request.metadata_count) = (0, 1);
            assert_eq!(driver.submit(request, &[short, short]), IoStatus::INVALID_FIELD);
        }
        assert_eq!(driver.run_with_segments(Operation::Read, 0, 1, &[short]), IoStatus::SUCCESS);
    }
}

#[test]
fn full_channel_returns_unaccepted_requests() {
    for subject in all_devices() {
        let mut driver = subject.synchronous_channel();
        let depth = u64::from(driver.limits().depth_max);
        let memory = driver.memory(1);
        let requests: Vec<_> = (0..depth + 100)
            .map(|token| {
                let operation = if token % 3 == 0 { Operation::Flush } else { Operation::Read };
                let mut request = driver.request(operation, token % 64, 1);
                (request.token, request.segment_count) = (token, 1);
                request
            })
            .collect();
        let taken = driver.channel.submit(Instant::default(), &requests, &[memory]);
        assert_eq!(taken as u64, depth, "{}", driver.name);
        let more = driver.channel.submit(Instant::default(), &requests[taken..], &[memory]);
        assert_eq!(more, 0, "{}", driver.name);

        let mut seen = vec![0; requests.len()];
        let mut left = &requests[taken..];
        while seen.iter().sum::<usize>() < requests.len() {
            let completions = driver.poll_once(7);
            for completion in &completions {
                assert_eq!(completion.status, IoStatus::SUCCESS);
                seen[usize::try_from(completion.token).unwrap()] += 1;
            }
            // As many as have completed, however many more are available.
            let taken = driver.channel.submit(driver.now, left, &[memory]);
            assert_eq!(taken, completions.len().min(left.len()), "{}", driver.name);
            left = &left[taken..];
        }
        assert!(seen.iter().all(|count| *count == 1), "{}", driver.name);
        assert!(driver.poll_once(7).is_empty());
        if !subject.is_busy {
            assert_eq!(driver.channel.wake_at(), Instant::NEVER, "nothing is left to wait for");
        }
    }
}

#[test]
fn channel_is_kernel_io_exactly_if_all_leaves_are_files() {
    let others = ["ram:", "null:", "model:", "delay:[", "fault:[", "reluctant:"];
    for subject in all_devices() {
        let files_only = !others.iter().any(|other| subject.name.contains(other));
        let channel = subject.synchronous_channel().channel;
        assert_eq!(channel.is_done_by_local_kernel(), files_only, "{}", subject.name);
    }
}

#[test]
fn sleeping_thread_is_woken_for_every_completion() {
    for subject in all_devices() {
        let mut driver = subject.synchronous_channel();
        let memory = driver.memory(1);
        let mut sleeper = Sleeper::new().unwrap();
        if let WakeSource::Descriptor(descriptor) = driver.channel.wake_source() {
            sleeper.sources().add_source(descriptor, 0).unwrap();
        }
        assert!(!driver.channel.arm(), "{}: nothing is owed", driver.name);
        driver.channel.disarm();
        for round in 0..100 {
            let operation = [Operation::Read, Operation::Write, Operation::Flush][round % 3];
            let blocks = u32::from(operation != Operation::Flush);
            let mut request = driver.request(operation, 0, blocks);
            request.segment_count = u16::from(blocks > 0);
            assert_eq!(driver.channel.submit(driver.now, &[request], &[memory]), 1);
            let mut completions = CompletionBatch::with_capacity(1);
            while completions.as_slice().is_empty() {
                driver.sleep(&mut sleeper);
                driver.channel.poll(driver.now, &mut completions);
            }
        }
    }
}

#[test]
fn poll_returns_at_most_the_batch_capacity() {
    for subject in all_devices() {
        let mut driver = subject.synchronous_channel();
        let requests = [driver.request(Operation::Flush, 0, 0); 3];
        assert_eq!(driver.channel.submit(Instant::default(), &requests, &[]), 3);
        assert_eq!(driver.channel.poll(driver.now, &mut CompletionBatch::with_capacity(0)), 0);
        let mut count = 0;
        while count < 3 {
            let completions = driver.poll_once(1);
            assert!(completions.len() <= 1);
            count += completions.len();
        }
    }
}

#[test]
fn all_channels_see_the_same_blocks() {
    for subject in readable_tested_devices() {
        let (mut left, mut right) = (subject.synchronous_channel(), subject.synchronous_channel());
        assert_eq!(left.write(3, 1, 0x77, RequestFlags::NONE), IoStatus::SUCCESS);
        let (status, bytes) = right.read(3, 1, RequestFlags::NONE);
        assert_eq!(status, IoStatus::SUCCESS);
        assert!(bytes.iter().all(|byte| *byte == 0x77));
        if !right.supports(Operation::WriteUncorrectable) {
            continue;
        }
        right.run_expecting_success(Operation::WriteUncorrectable, 3, 1, RequestFlags::NONE);
        assert_eq!(left.read(3, 1, RequestFlags::NONE).0, IoStatus::UNRECOVERED_READ);
    }
}

#[test]
fn uncorrectable_block_fails_reads_until_written() {
    for subject in readable_tested_devices() {
        let mut driver = subject.synchronous_channel();
        if !driver.supports(Operation::WriteUncorrectable) {
            let status =
                driver.run_request(Operation::WriteUncorrectable, 20, 3, RequestFlags::NONE);
            assert_eq!(status, IoStatus::INVALID_OPCODE, "{}", driver.name);
            continue;
        }
        for cure in 0..if driver.supports(Operation::Copy) { 3 } else { 2 } {
            driver.run_expecting_success(Operation::WriteUncorrectable, 20, 3, RequestFlags::NONE);
            driver.run_expecting_success(Operation::Deallocate, 20, 3, RequestFlags::NONE);
            let memory = driver.memory(1);
            for operation in [Operation::Read, Operation::Compare] {
                let status = driver.run_with_segments(operation, 21, 1, &[memory]);
                assert_eq!(status, IoStatus::UNRECOVERED_READ, "{} {operation:?}", driver.name);
            }
            if driver.supports(Operation::Copy) {
                assert_eq!(driver.copy(21, 40, 1), IoStatus::UNRECOVERED_READ);
            }
            assert_eq!(
                driver.read(23, 1, RequestFlags::NONE).0,
                IoStatus::SUCCESS,
                "the neighbour"
            );
            match cure {
                0 => assert_eq!(driver.write(21, 1, 1, RequestFlags::NONE), IoStatus::SUCCESS),
                1 if driver.supports(Operation::WriteZeroes) => {
                    driver.run_expecting_success(Operation::WriteZeroes, 21, 1, RequestFlags::NONE);
                }
                1 => assert_eq!(driver.write(21, 1, 0, RequestFlags::FUA), IoStatus::SUCCESS),
                _ => assert_eq!(driver.copy(50, 21, 1), IoStatus::SUCCESS),
            }
            assert_eq!(driver.read(21, 1, RequestFlags::NONE).0, IoStatus::SUCCESS);
            assert_eq!(driver.read(20, 3, RequestFlags::NONE).0, IoStatus::UNRECOVERED_READ);
        }
    }
}

#[test]
fn fua_and_flush_requests_complete() {
    for subject in all_devices() {
        let mut driver = subject.synchronous_channel();
        assert_eq!(driver.write(0, 1, 5, RequestFlags::FUA), IoStatus::SUCCESS);
        driver.run_expecting_success(Operation::Flush, 0, 0, RequestFlags::NONE);
        let (status, bytes) = driver.read(0, 1, RequestFlags::FUA);
        assert_eq!(status, IoStatus::SUCCESS);
        assert!(subject.moves == bytes.iter().all(|byte| *byte == 5), "{}", driver.name);
        let away = RequestFlags::FUA.union(RequestFlags::DEALLOCATE);
        for (operation, flags) in
            [(Operation::Deallocate, RequestFlags::FUA), (Operation::WriteZeroes, away)]
        {
            if driver.supports(operation) {
                driver.run_expecting_success(operation, 0, 1, flags);
            }
        }
        let expected =
            if subject.stays { Durability::VolatileCache } else { Durability::NonPersistent };
        assert_eq!(driver.limits().durability, expected, "{}", driver.name);
    }
}

#[test]
fn concurrent_requests_do_not_interfere() {
    for subject in readable_tested_devices() {
        let mut driver = subject.synchronous_channel();
        let mut random = Random::new(4);
        let size = driver.limits().block_size;
        // Each place has its own block and its own memory, some of it unaligned.
        let memory = driver.memory(80);
        let place = |index: u32| memory.slice(index * (size + 64) + index % 3 * 4, size).unwrap();
        let segments: Vec<Segment> = (0..64).map(place).collect();
        let mut stamps = [0_u8; 64];
        let mut busy: [Option<Operation>; 64] = [None; 64];
        let mut done = 0;
        while done < 2_000 {
            let index = u32::try_from(random.below(64)).unwrap();
            let at = index as usize;
            if busy[at].is_none() {
                let write = random.chance(1, 2);
                let operation = if write { Operation::Write } else { Operation::Read };
                let stamp = stamps[at].wrapping_add(u8::from(write));
                let fill = if write { stamp } else { !stamp };
                driver.write_segments(&[place(index)], &vec![fill; size as usize]);
                let mut request = driver.request(operation, u64::from(index), 1);
                (request.token, request.segment_count) = (u64::from(index), 1);
                request.segment_first = index;
                // A device that lacks buffers accepts none now.
                if driver.channel.submit(driver.now, &[request], &segments) == 1 {
                    (busy[at], stamps[at]) = (Some(operation), stamp);
                }
            }
            if random.chance(1, 4) || busy.iter().all(Option::is_some) {
                for completion in driver.poll_once(16) {
                    let index = u32::try_from(completion.token).unwrap();
                    assert_eq!(completion.status, IoStatus::SUCCESS);
                    assert!(busy[index as usize].take().is_some(), "answered once");
                    let held = driver.read_segments(&[place(index)]);
                    let stamp = stamps[index as usize];
                    assert!(held.iter().all(|byte| *byte == stamp), "{} {index}", driver.name);
                    done += 1;
                }
            }
        }
    }
}
