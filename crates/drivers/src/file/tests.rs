use std::collections::VecDeque;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard};

use tenmil_base::{
    BlockDevice, BlockExtent, CompletionBatch, ErrorCategory, ExtentKind, Instant, IoChannel,
    IoStatus, Memory, Operation, Request, RequestFlags, Segment, WakeSource,
};
use tenmil_dma::{KernelBufferSource, MemoryBacking, MemoryMapping, RegionTable};
use tenmil_linux::Errno;
use tenmil_linux::file_engine::{EngineChoice, FileOp, JobCompletion, SubmitError};
use tenmil_linux::storage_file::{
    BufferedReason, DirectIoAlignment, FileExtent, FileOptions, StorageFile,
};

use super::file_channel::is_aligned_for_direct_io;
use super::{FileDevice, FileDeviceOptions, to_whole_blocks};

const BLOCK: u32 = 4096;

fn file_options(path: &Path, size_bytes: Option<u64>) -> FileDeviceOptions {
    let (path, engine) = (path.into(), EngineChoice::Best);
    let (direct, read_only) = (true, false);
    FileDeviceOptions { path, size_bytes, block_size: BLOCK, direct, read_only, engine }
}

fn run_request(
    channel: &mut dyn IoChannel,
    operation: Operation,
    blocks: u32,
    memory: Segment,
) -> IoStatus {
    let moves = matches!(operation, Operation::Read | Operation::Write);
    let request = Request {
        token: 1,
        lba: 16,
        operand: 0,
        blocks,
        segment_first: 0,
        segment_count: u16::from(moves),
        metadata_count: 0,
        operation,
        flags: RequestFlags::NONE,
    };
    let mut completions = CompletionBatch::with_capacity(1);
    assert_eq!(channel.submit(Instant::default(), &[request], &[memory]), 1);
    channel.flush_submissions();
    while channel.poll(Instant::default(), &mut completions) == 0 {
        std::hint::spin_loop();
    }
    completions.as_slice()[0].status
}

#[test]
fn flushed_data_is_present_after_reopen() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("blocks");
    let regions = RegionTable::new(8);
    let memory =
        regions.add_mapping(MemoryMapping::new(1 << 16, MemoryBacking::Private).unwrap()).unwrap();
    for (size_bytes, operation, fill) in
        [(Some(1 << 20), Operation::Write, 0x5a), (None, Operation::Read, 0)]
    {
        let medium = FileDevice::open(&regions, &file_options(&path, size_bytes)).unwrap();
        assert_eq!(medium.limits().block_count, 256);
        let mut channel = medium.channel().unwrap();
        regions.fill(memory, fill).unwrap();
        assert_eq!(run_request(&mut *channel, operation, 16, memory), IoStatus::SUCCESS);
        assert_eq!(run_request(&mut *channel, Operation::Flush, 0, memory), IoStatus::SUCCESS);
    }
    let mut bytes = vec![0; 1 << 16];
    regions.load(memory, &mut bytes).unwrap();
    assert!(bytes.iter().all(|byte| *byte == 0x5a));
}

#[test]
fn holes_are_reported_with_their_extent() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("blocks");
    let regions = RegionTable::new(8);
    let memory =
        regions.add_mapping(MemoryMapping::new(1 << 16, MemoryBacking::Private).unwrap()).unwrap();
    let medium = FileDevice::open(&regions, &file_options(&path, Some(1 << 20))).unwrap();
    let extent = |blocks, holds| Ok(BlockExtent { blocks, kind: holds });
    assert_eq!(medium.block_status(0), extent(256, ExtentKind::Hole));
    let mut channel = medium.channel().unwrap();
    assert_eq!(run_request(&mut *channel, Operation::Write, 16, memory), IoStatus::SUCCESS);
    assert_eq!(run_request(&mut *channel, Operation::Flush, 0, memory), IoStatus::SUCCESS);
    assert_eq!(medium.block_status(3), extent(13, ExtentKind::Hole));
    assert_eq!(medium.block_status(17), extent(15, ExtentKind::Data));
    assert_eq!(medium.block_status(32), extent(224, ExtentKind::Hole));
    assert_eq!(medium.block_status(256), extent(0, ExtentKind::Data), "past the end");
    assert_eq!(run_request(&mut *channel, Operation::Deallocate, 16, memory), IoStatus::SUCCESS);
    assert_eq!(medium.block_status(0), extent(256, ExtentKind::Hole));
    let lost = run_request(&mut *channel, Operation::WriteUncorrectable, 2, memory);
    assert_eq!(lost, IoStatus::SUCCESS);
    assert_eq!(medium.block_status(0), extent(16, ExtentKind::Hole));
    assert_eq!(medium.block_status(16), extent(2, ExtentKind::Data), "it cannot be read as zeroes");
}

#[test]
fn regrown_file_reads_zeroes() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("blocks");
    let regions = RegionTable::new(8);
    let memory =
        regions.add_mapping(MemoryMapping::new(1 << 16, MemoryBacking::Private).unwrap()).unwrap();
    let medium = FileDevice::open(&regions, &file_options(&path, Some(1 << 20))).unwrap();
    let mut channel = medium.channel().unwrap();
    regions.fill(memory, 0x5a).unwrap();
    assert_eq!(run_request(&mut *channel, Operation::Write, 16, memory), IoStatus::SUCCESS);
    assert_eq!(
        run_request(&mut *channel, Operation::WriteUncorrectable, 4, memory),
        IoStatus::SUCCESS
    );
    medium.resize(20).unwrap();
    assert_eq!(medium.limits().block_count, 20);
    let past = run_request(&mut *channel, Operation::Read, 16, memory);
    assert_eq!(past, IoStatus::LBA_OUT_OF_RANGE, "blocks 16 to 32");
    assert_eq!(channel.limits().block_count, 20);
    medium.resize(16).unwrap();
    medium.resize(512).unwrap();
    assert_eq!(medium.block_status(511), Ok(BlockExtent { blocks: 1, kind: ExtentKind::Hole }));
    assert_eq!(run_request(&mut *channel, Operation::Read, 16, memory), IoStatus::SUCCESS);
    let mut bytes = vec![1; 1 << 16];
    regions.load(memory, &mut bytes).unwrap();
    assert!(bytes.iter().all(|byte| *byte == 0), "what was lost is lost, marks too");
    for impossible in [0, u64::MAX] {
        let said = medium.resize(impossible).unwrap_err();
        assert!(said.text.ends_with("expected at least 1, and fewer than 2^64 bytes"), "{said}");
    }
    assert!(medium.resize(1 << 50).is_err(), "no file system has files of that size");
    assert_eq!(medium.limits().block_count, 512);
}

#[test]
fn registered_memory_is_used_by_the_ring_only() {
    let directory = tempfile::tempdir().unwrap();
    let regions = RegionTable::new(8);
    let alignment = DirectIoAlignment { memory_bytes: 512, offset_bytes: 4096 };
    let mut options = file_options(&directory.path().join("blocks"), Some(1 << 20));
    let medium = FileDevice::open_with_alignment(&regions, &options, Ok(alignment)).unwrap();
    match medium.has_ring {
        true => assert_eq!(medium.supports_kernel_buffers(), Ok(512)),
        false => println!("skipped: io_uring is not allowed here"),
    }
    let descriptor = tempfile::tempfile().unwrap().into();
    let lender = KernelBufferSource { descriptor, queue: 0, data_at: |_, _, _| 0 };
    let leased = regions.register_kernel_buffers(lender, (4, 1 << 16)).unwrap();
    let goes = |segment| is_aligned_for_direct_io(&medium.shared, &[segment]);
    assert!(goes(leased.slice(1 << 16, 8192).unwrap()), "its address is the lender's");
    assert!(!goes(leased.slice(0, 512).unwrap()), "half a block");
    assert!(!goes(leased.slice(1 << 15, 1 << 16).unwrap()), "parts of two requests");
    options.engine = EngineChoice::Threads;
    options.path = directory.path().join("others");
    let refused =
        FileDevice::open(&regions, &options).unwrap().supports_kernel_buffers().unwrap_err();
    assert!(
        refused.text.contains("threads") && refused.text.contains("expected io_uring"),
        "{refused}"
    );
}

#[test]
fn partially_hole_block_is_data() {
    for (len_bytes, is_hole, blocks, holds) in [
        (4096, true, 1, ExtentKind::Hole),
        (4095, true, 1, ExtentKind::Data),
        (8191, true, 1, ExtentKind::Hole),
        (4095, false, 1, ExtentKind::Data),
        (8192, false, 2, ExtentKind::Data),
        (8193, false, 3, ExtentKind::Data),
    ] {
        let found = to_whole_blocks(FileExtent { len_bytes, is_hole }, 4096);
        assert_eq!(found, BlockExtent { blocks, kind: holds }, "{len_bytes} {is_hole}");
    }
}

#[test]
#[expect(clippy::disallowed_methods, reason = "a test makes the file that is read")]
fn read_only_file_rejects_writes() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("blocks");
    std::fs::write(&path, [7; 1 << 17]).unwrap();
    let regions = RegionTable::new(8);
    let memory =
        regions.add_mapping(MemoryMapping::new(1 << 16, MemoryBacking::Private).unwrap()).unwrap();
    let to_read = FileDeviceOptions { read_only: true, ..file_options(&path, None) };
    let medium = FileDevice::open(&regions, &to_read).unwrap();
    let mut channel = medium.channel().unwrap();
    assert_eq!(run_request(&mut *channel, Operation::Read, 16, memory), IoStatus::SUCCESS);
    for operation in [Operation::Write, Operation::WriteZeroes, Operation::Deallocate] {
        let status = run_request(&mut *channel, operation, 16, memory);
        assert_eq!(status, IoStatus::INVALID_OPCODE, "{operation:?}");
    }
    assert!(medium.existing_data().is_none(), "nothing can be lost");
}

#[test]
fn deallocate_frees_file_space() {
    let directory = tempfile::tempdir().unwrap();
    let regions = RegionTable::new(8);
    let memory =
        regions.add_mapping(MemoryMapping::new(1 << 18, MemoryBacking::Private).unwrap()).unwrap();
    let options = file_options(&directory.path().join("blocks"), Some(1 << 20));
    let medium = FileDevice::open(&regions, &options).unwrap();
    let mut channel = medium.channel().unwrap();
    let room = || medium.shared.file.allocated_bytes();
    assert_eq!(run_request(&mut *channel, Operation::Write, 64, memory), IoStatus::SUCCESS);
    assert_eq!(run_request(&mut *channel, Operation::Flush, 0, memory), IoStatus::SUCCESS);
    let full = room();
    assert!(full >= 1 << 18);
    assert_eq!(run_request(&mut *channel, Operation::Deallocate, 64, memory), IoStatus::SUCCESS);
    assert!(room() + (1 << 18) <= full, "{full} {}", room());
}

#[test]
fn channel_memory_is_reused_by_the_next_channel() {
    let directory = tempfile::tempdir().unwrap();
    // One region for the zeroes, two for two channels at a time.
    let regions = RegionTable::new(3);
    let options = file_options(&directory.path().join("blocks"), Some(1 << 20));
    let medium = FileDevice::open(&regions, &options).unwrap();
    for _ in 0..5 {
        let two = [medium.channel(), medium.channel()];
        assert!(two.iter().all(Result::is_ok));
        let third = medium.channel().err().unwrap();
        assert!(third.text.contains("made for 3"), "{third}");
    }
}

#[test]
fn description_names_the_engine() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("blocks");
    let regions = RegionTable::new(8);
    let mut options = file_options(&path, Some(1 << 20));
    (options.direct, options.engine) = (false, EngineChoice::Threads);
    let said = FileDevice::open(&regions, &options).unwrap().description();
    let expected = "by threads, through the page cache, as requested";
    assert_eq!(said, format!("file {} {expected}", path.display()));
}

#[test]
fn durability_depends_on_the_file_system() {
    let regions = RegionTable::new(8);
    let directories = [tempfile::tempdir(), tempfile::tempdir_in("/dev/shm")];
    for directory in directories.into_iter().flatten() {
        let path = directory.path().join("blocks");
        let medium = FileDevice::open(&regions, &file_options(&path, Some(1 << 20))).unwrap();
        let durability = medium.limits().durability;
        drop(medium);
        let (len_bytes, unit_bytes, direct, read_only) = (None, BLOCK, true, false);
        let file = FileOptions { path, len_bytes, unit_bytes, direct, read_only };
        assert_eq!(durability, StorageFile::open(&file).unwrap().durability(), "{directory:?}");
    }
}

#[test]
fn unusable_file_is_rejected() {
    let directory = tempfile::tempdir().unwrap();
    let regions = RegionTable::new(8);
    let missing = file_options(&directory.path().join("missing"), None);
    let error = FileDevice::open(&regions, &missing).unwrap_err();
    assert_eq!(error.category(), ErrorCategory::Usage);
    assert!(error.to_string().starts_with("file: open "), "{error}");
    let odd = FileDeviceOptions { block_size: 1000, ..missing };
    let error = FileDevice::open(&regions, &odd).unwrap_err();
    assert_eq!(
        error.to_string(),
        "file: block size is 1000, expected a power of two from 512 to 65536"
    );
}

/// A kernel that completes each job on command, with the given result.
#[derive(Clone, Debug, Default)]
struct ManualFileEngine(Arc<Mutex<ManualFileEngineJobs>>);

#[derive(Debug, Default)]
struct ManualFileEngineJobs {
    /// Tokens of the syncs, and of all other jobs, in flight.
    syncs: VecDeque<u64>,
    others: VecDeque<u64>,
    ended: Vec<JobCompletion>,
    /// Writes that were submitted as stable ones.
    stable: u32,
}

impl ManualFileEngine {
    fn lock_jobs(&self) -> MutexGuard<'_, ManualFileEngineJobs> {
        self.0.lock().unwrap()
    }

    fn end_sync(&self, result: Result<(), Errno>) {
        let mut jobs = self.lock_jobs();
        let token = jobs.syncs.pop_front().expect("a sync is under way");
        jobs.ended.push(JobCompletion { token, result });
    }

    fn complete_non_sync_job(&self, result: Result<(), Errno>) {
        let mut jobs = self.lock_jobs();
        let token = jobs.others.pop_front().expect("a job is under way");
        jobs.ended.push(JobCompletion { token, result });
    }
}

impl super::FileIo for ManualFileEngine {
    fn submit(&mut self, token: u64, job: FileOp<'_>) -> Result<(), SubmitError> {
        let mut jobs = self.lock_jobs();
        match job {
            FileOp::Sync => jobs.syncs.push_back(token),
            FileOp::Write { fua, .. } => {
                jobs.stable += u32::from(fua);
                jobs.others.push_back(token);
            }
            _ => jobs.others.push_back(token),
        }
        Ok(())
    }

    fn flush_submissions(&mut self) {}

    fn poll(&mut self, ended: &mut Vec<JobCompletion>) {
        ended.append(&mut self.lock_jobs().ended);
    }

    fn wake_source(&self) -> WakeSource<'_> {
        WakeSource::None
    }

    fn arm(&mut self) -> bool {
        false
    }

    fn disarm(&mut self) {}

    fn has_unsubmitted(&self) -> bool {
        false
    }
}

/// A file with channels over a simulated kernel.
struct FileFixture {
    medium: FileDevice,
    memory: Segment,
    _directory: tempfile::TempDir,
}

impl FileFixture {
    fn new() -> Self {
        Self::with_direct_io(Ok(DirectIoAlignment { memory_bytes: 4096, offset_bytes: 4096 }))
    }

    fn with_direct_io(direct: Result<DirectIoAlignment, BufferedReason>) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let regions = RegionTable::new(16);
        let memory = regions
            .add_mapping(MemoryMapping::new(1 << 16, MemoryBacking::Private).unwrap())
            .unwrap();
        let path = directory.path().join("blocks");
        let options = file_options(&path, Some(1 << 20));
        let medium = FileDevice::open_with_alignment(&regions, &options, direct).unwrap();
        Self { medium, memory, _directory: directory }
    }

    fn channel_and_engine(&self) -> (Box<dyn IoChannel>, ManualFileEngine) {
        let kernel = ManualFileEngine::default();
        (self.medium.open_channel_with_engine(kernel.clone()).unwrap(), kernel)
    }

    fn submit(
        &self,
        channel: &mut dyn IoChannel,
        token: u64,
        operation: Operation,
        flags: RequestFlags,
    ) {
        let moves = matches!(operation, Operation::Read | Operation::Write);
        let request = Request {
            token,
            lba: 0,
            operand: 0,
            blocks: if operation == Operation::Flush { 0 } else { 1 },
            segment_first: 0,
            segment_count: u16::from(moves),
            metadata_count: 0,
            operation,
            flags,
        };
        let memory = self.memory.slice(0, BLOCK).unwrap();
        assert_eq!(channel.submit(Instant::default(), &[request], &[memory]), 1);
    }
}

fn poll_completions(channel: &mut dyn IoChannel) -> Vec<(u64, IoStatus)> {
    let mut completions = CompletionBatch::with_capacity(16);
    channel.poll(Instant::default(), &mut completions);
    completions.as_slice().iter().map(|completion| (completion.token, completion.status)).collect()
}

#[test]
fn lost_write_fails_flushes_of_every_channel_until_acknowledged() {
    let bench = FileFixture::new();
    let (sender, reported_values) = std::sync::mpsc::channel();
    let path = bench.medium.shared.file.path().to_owned();
    super::subscribe_lost_writes(move |new_events| {
        // After the test, the receiver is dropped.
        let _ = if new_events.path == path { sender.send(new_events.to_string()) } else { Ok(()) };
    });
    let (mut one, kernel_one) = bench.channel_and_engine();
    let (mut other, kernel_other) = bench.channel_and_engine();
    bench.submit(&mut *one, 1, Operation::Flush, RequestFlags::NONE);
    kernel_one.end_sync(Err(Errno::IO));
    assert_eq!(poll_completions(&mut *one), [(1, IoStatus::WRITE_FAULT)]);
    let (mut late, kernel_late) = bench.channel_and_engine();
    for (channel, kernel) in
        [(&mut one, &kernel_one), (&mut other, &kernel_other), (&mut late, &kernel_late)]
    {
        for _ in 0..2 {
            bench.submit(&mut **channel, 2, Operation::Flush, RequestFlags::NONE);
            kernel.end_sync(Ok(()));
            assert_eq!(poll_completions(&mut **channel), [(2, IoStatus::WRITE_FAULT)]);
        }
        for operation in [Operation::Write, Operation::WriteZeroes, Operation::Deallocate] {
            bench.submit(&mut **channel, 3, operation, RequestFlags::FUA);
            kernel.complete_non_sync_job(Ok(()));
            let mut found = poll_completions(&mut **channel);
            if operation != Operation::Write {
                kernel.end_sync(Ok(()));
                found = poll_completions(&mut **channel);
            }
            assert_eq!(found, [(3, IoStatus::WRITE_FAULT)], "{operation:?}");
        }
        bench.submit(&mut **channel, 4, Operation::Read, RequestFlags::FUA);
        kernel.end_sync(Ok(()));
        assert_eq!(poll_completions(&mut **channel), [(4, IoStatus::WRITE_FAULT)]);
        // Requests that need no stable storage continue.
        for operation in [Operation::Read, Operation::Write] {
            bench.submit(&mut **channel, 5, operation, RequestFlags::NONE);
            kernel.complete_non_sync_job(Ok(()));
            assert_eq!(poll_completions(&mut **channel), [(5, IoStatus::SUCCESS)]);
        }
    }
    let new_events = reported_values.recv_timeout(std::time::Duration::from_secs(60)).unwrap();
    assert!(new_events.contains("completed writes may be lost"), "{new_events}");
    assert!(reported_values.try_recv().is_err(), "it is reported once");
}

#[test]
fn acknowledged_loss_still_fails_a_flush_of_every_other_channel() {
    let bench =
        FileFixture::with_direct_io(Ok(DirectIoAlignment { memory_bytes: 512, offset_bytes: 512 }));
    let (mut owner, kernel) = bench.channel_and_engine();
    let (mut other, kernel_other) = bench.channel_and_engine();
    let flush = |channel: &mut dyn IoChannel, kernel: &ManualFileEngine, result| {
        bench.submit(channel, 1, Operation::Flush, RequestFlags::NONE);
        kernel.end_sync(result);
        poll_completions(channel)[0].1
    };
    for round in 1..3 {
        assert_eq!(flush(&mut *owner, &kernel, Err(Errno::IO)), IoStatus::WRITE_FAULT);
        assert_eq!(
            flush(&mut *owner, &kernel, Ok(())),
            IoStatus::WRITE_FAULT,
            "the loss is not acknowledged yet"
        );
        // Two syncs under way and waiting were asked for before the owner acknowledges.
        bench.submit(&mut *owner, 2, Operation::Flush, RequestFlags::NONE);
        bench.submit(&mut *owner, 3, Operation::Flush, RequestFlags::NONE);
        assert_eq!(owner.known_write_loss_count(), round);
        owner.accept_write_losses().unwrap();
        kernel.end_sync(Ok(()));
        assert_eq!(poll_completions(&mut *owner), [(2, IoStatus::WRITE_FAULT)], "round {round}");
        kernel.end_sync(Ok(()));
        assert_eq!(poll_completions(&mut *owner), [(3, IoStatus::WRITE_FAULT)], "round {round}");
        assert_eq!(flush(&mut *owner, &kernel, Ok(())), IoStatus::SUCCESS);
        for _ in 0..2 {
            assert_eq!(flush(&mut *other, &kernel_other, Ok(())), IoStatus::WRITE_FAULT);
        }
        other.ack_repaired_write_losses(round - 1);
        assert_eq!(flush(&mut *other, &kernel_other, Ok(())), IoStatus::WRITE_FAULT);
        other.ack_repaired_write_losses(round);
        assert_eq!(flush(&mut *other, &kernel_other, Ok(())), IoStatus::SUCCESS);
        let (mut late, kernel_late) = bench.channel_and_engine();
        assert_eq!(flush(&mut *late, &kernel_late, Ok(())), IoStatus::SUCCESS, "it came after");
        bench.submit(&mut *late, 4, Operation::Write, RequestFlags::FUA);
        kernel_late.complete_non_sync_job(Ok(()));
        assert_eq!(poll_completions(&mut *late), [(4, IoStatus::SUCCESS)]);
    }
}

#[test]
fn loss_is_not_acknowledged_with_buffered_io() {
    for (why, fix) in [
        (BufferedReason::Requested, "fix: open it without direct=no"),
        (BufferedReason::UnitTooSmall(4096), "fix: open it with block=4096"),
        (BufferedReason::NotSupported(Errno::INVAL), "/proc/sys/vm/drop_caches"),
    ] {
        let bench = FileFixture::with_direct_io(Err(why));
        let (mut channel, kernel) = bench.channel_and_engine();
        for result in [Err(Errno::IO), Ok(())] {
            bench.submit(&mut *channel, 1, Operation::Flush, RequestFlags::NONE);
            kernel.end_sync(result);
            assert_eq!(poll_completions(&mut *channel), [(1, IoStatus::WRITE_FAULT)]);
            let said = channel.accept_write_losses().unwrap_err();
            assert!(
                said.text.contains("read through the page cache") && said.text.contains(fix),
                "{said}"
            );
        }
        // Who has written it again needs no read.
        channel.ack_repaired_write_losses(1);
        bench.submit(&mut *channel, 1, Operation::Flush, RequestFlags::NONE);
        kernel.end_sync(Ok(()));
        assert_eq!(poll_completions(&mut *channel), [(1, IoStatus::SUCCESS)]);
    }
}

#[test]
fn failed_fua_write_may_report_earlier_losses() {
    for (errno, status, after) in [
        (Errno::IO, IoStatus::WRITE_FAULT, IoStatus::WRITE_FAULT),
        (Errno::FBIG, IoStatus::CAPACITY_EXCEEDED, IoStatus::SUCCESS),
        (Errno::INVAL, IoStatus::INTERNAL_ERROR, IoStatus::SUCCESS),
    ] {
        let bench = FileFixture::new();
        let (mut channel, kernel) = bench.channel_and_engine();
        for flags in [RequestFlags::NONE, RequestFlags::FUA] {
            bench.submit(&mut *channel, 1, Operation::Write, flags);
            kernel.complete_non_sync_job(Err(errno));
            assert_eq!(poll_completions(&mut *channel), [(1, status)], "{errno:?}");
            bench.submit(&mut *channel, 2, Operation::Flush, RequestFlags::NONE);
            kernel.end_sync(Ok(()));
            let expected = if flags == RequestFlags::FUA { after } else { IoStatus::SUCCESS };
            assert_eq!(poll_completions(&mut *channel), [(2, expected)], "{errno:?} {flags:?}");
        }
    }
    assert!(
        !super::lost_write::may_report_lost_writes(Errno::NOSPC),
        "that is about its own blocks"
    );
}

#[test]
fn every_buffered_fua_write_fails_after_a_loss() {
    for (direct, is_cached) in [
        (Err(BufferedReason::Requested), true),
        (Ok(DirectIoAlignment { memory_bytes: 4096, offset_bytes: 4096 }), false),
    ] {
        let bench = FileFixture::with_direct_io(direct);
        let mut channels = [(); 3].map(|()| bench.channel_and_engine());
        let mut is_reported = false;
        for (channel, kernel) in &mut channels {
            bench.submit(&mut **channel, 1, Operation::Write, RequestFlags::FUA);
            // All write by one description, to which the kernel reports the loss once.
            let is_stable = kernel.lock_jobs().stable > 0;
            assert_eq!(is_stable, !is_cached);
            let is_reported = is_stable && !std::mem::replace(&mut is_reported, true);
            kernel.complete_non_sync_job(if is_reported { Err(Errno::IO) } else { Ok(()) });
        }
        // The one that the kernel told is polled last.
        let found = channels.iter_mut().rev().map(|(channel, kernel)| {
            let found = poll_completions(&mut **channel);
            if !is_cached {
                return found;
            }
            assert_eq!(found, [], "it is not stable yet");
            kernel.end_sync(Err(Errno::IO));
            poll_completions(&mut **channel)
        });
        let found: Vec<_> = found.flatten().map(|(_, status)| status).collect();
        // A direct write reports what became of its own blocks.
        let own = if is_cached { IoStatus::WRITE_FAULT } else { IoStatus::SUCCESS };
        assert_eq!(found, [own, own, IoStatus::WRITE_FAULT]);
    }
}

#[test]
fn flushes_of_a_channel_are_serialized_and_share_the_next_sync() {
    let bench = FileFixture::new();
    let (mut channel, kernel) = bench.channel_and_engine();
    for token in 1..=4 {
        bench.submit(&mut *channel, token, Operation::Flush, RequestFlags::NONE);
        assert_eq!(kernel.lock_jobs().syncs.len(), 1, "one is under way");
    }
    assert_eq!(poll_completions(&mut *channel), []);
    kernel.end_sync(Ok(()));
    assert_eq!(poll_completions(&mut *channel), [(1, IoStatus::SUCCESS)]);
    assert_eq!(kernel.lock_jobs().syncs.len(), 1, "one for the three that came meanwhile");
    bench.submit(&mut *channel, 5, Operation::Flush, RequestFlags::NONE);
    kernel.end_sync(Err(Errno::IO));
    let failed = |tokens: &[u64]| -> Vec<_> {
        tokens.iter().map(|token| (*token, IoStatus::WRITE_FAULT)).collect()
    };
    assert_eq!(poll_completions(&mut *channel), failed(&[2, 3, 4]));
    kernel.end_sync(Ok(()));
    assert_eq!(
        poll_completions(&mut *channel),
        failed(&[5]),
        "the kernel has forgotten, and we have not"
    );
    assert_eq!(kernel.lock_jobs().syncs.len(), 0);
}
