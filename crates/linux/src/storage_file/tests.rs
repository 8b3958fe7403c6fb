use std::cell::{Cell, RefCell};
use std::io::{Seek, SeekFrom};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;

use tenmil_base::ErrorCategory;

use super::{BufferedReason, FileError, FileExtent, FileOptions, StorageFile, create_files_if_ok};

thread_local! {
    /// The inodes that this thread has synced.
    static SYNCED: RefCell<Vec<u64>> = const { RefCell::new(Vec::new()) };
}

pub(super) fn record_sync(descriptor: BorrowedFd<'_>) {
    SYNCED.with_borrow_mut(|synced| synced.push(rustix::fs::fstat(descriptor).unwrap().st_ino));
}

fn open_file(
    path: &Path,
    len_bytes: Option<u64>,
    unit_bytes: u32,
) -> Result<StorageFile, FileError> {
    let (path, direct, read_only) = (path.into(), true, false);
    StorageFile::open(&FileOptions { path, len_bytes, unit_bytes, direct, read_only })
}

fn read_bytes(path: &Path, len_bytes: Option<u64>) -> Result<StorageFile, FileError> {
    let (path, unit_bytes, direct) = (path.into(), 512, true);
    StorageFile::open(&FileOptions { path, len_bytes, unit_bytes, direct, read_only: true })
}

#[test]
fn created_file_is_sparse() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("blocks");
    let file = open_file(&path, Some(64 << 20), 4096).unwrap();
    assert_eq!(file.len_bytes(), 64 << 20);
    assert!(file.allocated_bytes() < 1 << 20);
    drop(file);
    assert_eq!(open_file(&path, None, 4096).unwrap().len_bytes(), 64 << 20);
    assert_eq!(open_file(&path, Some(8192), 4096).unwrap().len_bytes(), 8192);
    assert_eq!(std::fs::metadata(&path).unwrap().len(), 64 << 20, "the rest is left alone");
}

#[test]
fn created_or_grown_file_is_synced_and_then_its_directory() {
    let directory = tempfile::tempdir().unwrap();
    let elsewhere = tempfile::tempdir().unwrap();
    let (path, link) = (directory.path().join("blocks"), elsewhere.path().join("link"));
    let inode = |path: &Path| std::fs::metadata(path).unwrap().ino();
    let synced = |at: &Path, len_bytes| {
        drop(open_file(at, len_bytes, 4096).unwrap());
        SYNCED.take()
    };
    std::os::unix::fs::symlink(&path, &link).unwrap();
    // The name is in the directory that the link leads to.
    for (at, len_bytes) in [(&link, 8192), (&path, 1 << 20), (&link, 2 << 20)] {
        let found = synced(at, Some(len_bytes));
        assert_eq!(found, [inode(&path), inode(directory.path())], "{len_bytes} bytes");
    }
    assert_eq!(synced(&path, Some(8192)), [], "it is as it was");
    assert_eq!(synced(&path, None), []);
    let file = open_file(&path, None, 4096).unwrap();
    file.resize(4 << 20).unwrap();
    assert_eq!(SYNCED.take(), [inode(&path)], "its name is where it was");
}

#[test]
fn created_or_grown_file_of_a_change_is_synced_on_commit() {
    let directory = tempfile::tempdir().unwrap();
    let [new, short] = ["new", "short"].map(|name| directory.path().join(name));
    std::fs::write(&short, [7; 1000]).unwrap();
    let change = |is_accepted: bool| {
        let opened = create_files_if_ok(|| {
            let files = [open_file(&new, Some(8192), 4096)?, open_file(&short, Some(8192), 4096)?];
            let missing = directory.path().join("no/such");
            if is_accepted { Ok(files) } else { Err(open_file(&missing, None, 4096).unwrap_err()) }
        });
        assert_eq!(opened.is_ok(), is_accepted);
    };
    change(false);
    SYNCED.take();
    change(true);
    let [new, short, names] =
        [&new, &short, directory.path()].map(|path| std::fs::metadata(path).unwrap().ino());
    assert_eq!(SYNCED.take(), [new, names, short, names]);
}

#[test]
fn failed_sync_is_an_error() {
    let (pipe, _other) = rustix::pipe::pipe().unwrap();
    assert_eq!(super::sync_descriptor(&pipe), Err(rustix::io::Errno::INVAL), "fsync(2)");
}

#[test]
fn file_is_extended_and_truncated_and_partly_used_ones_are_not() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("blocks");
    let on_disk = || std::fs::metadata(&path).unwrap().len();
    let file = open_file(&path, Some(8192), 4096).unwrap();
    file.resize(1 << 20).unwrap();
    assert_eq!((file.len_bytes(), on_disk()), (1 << 20, 1 << 20));
    assert_eq!(file.extent_at(8192), FileExtent { len_bytes: (1 << 20) - 8192, is_hole: true });
    file.resize(4096).unwrap();
    assert_eq!((file.len_bytes(), on_disk()), (4096, 4096));
    drop(file);
    std::fs::write(&path, [1; 10_000]).unwrap();
    for used in [Some(4096), None] {
        let file = open_file(&path, used, 4096).unwrap();
        let said = file.resize(16_384).unwrap_err().to_string();
        assert!(said.ends_with("are used, expected all of them: the rest is left alone"));
        assert_eq!(on_disk(), 10_000, "{said}");
    }
    let reader = read_bytes(&path, None).unwrap();
    assert!(reader.resize(512).is_err() && reader.len_bytes() == 9728);
}

/// The kernel reports a lost write once per open file description.
#[test]
fn sync_uses_a_separate_file_description() {
    let directory = tempfile::tempdir().unwrap();
    let file = open_file(&directory.path().join("blocks"), Some(8192), 4096).unwrap();
    let [one, other] = [0; 2].map(|_| std::fs::File::from(file.open_sync_descriptor().unwrap()));
    (&one).seek(SeekFrom::Start(4096)).unwrap();
    // Descriptors that share a file description share its position.
    assert_eq!((&other).stream_position().unwrap(), 0);
    let own = rustix::fs::seek(file.as_fd(), rustix::fs::SeekFrom::Current(0)).unwrap();
    assert_eq!(own, 0);
    assert!(one.sync_data().is_ok() && other.sync_data().is_ok());
}

#[test]
fn length_that_is_no_multiple_of_the_unit_is_rounded_down() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("blocks");
    std::fs::write(&path, [1; 1300]).unwrap();
    assert_eq!(open_file(&path, None, 512).unwrap().len_bytes(), 1024);
    let error = open_file(&path, None, 4096).unwrap_err();
    assert_eq!(error.category(), ErrorCategory::Usage);
    assert!(error.to_string().ends_with("1300 bytes, expected at least one block"), "{error}");
}

#[test]
fn unopenable_file_is_named_with_the_expected_state() {
    let directory = tempfile::tempdir().unwrap();
    let missing = directory.path().join("missing");
    let error = open_file(&missing, None, 512).unwrap_err();
    assert!(error.to_string().starts_with(&format!("open {}: ", missing.display())), "{error}");
    assert!(error.to_string().ends_with("with a size it would be made"), "{error}");
    assert!(open_file(directory.path(), Some(512), 512).is_err(), "a directory holds no blocks");
    assert!(open_file(&missing.join("deeper"), Some(512), 512).is_err());
    assert!(!missing.exists());
}

#[test]
fn file_is_opened_by_one_writer_at_a_time() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("blocks");
    let first = open_file(&path, Some(4096), 512).unwrap();
    let error = open_file(&path, Some(4096), 512).unwrap_err();
    assert!(error.to_string().contains("not open elsewhere"), "{error}");
    assert!(error.to_string().contains(": this process has it open already, "), "{error}");
    // As a ring does for a while after its process was killed.
    let lingering = first.as_fd().try_clone_to_owned().unwrap();
    drop(first);
    open_file(&path, Some(4096), 512).unwrap();
    drop(lingering);
}

#[test]
fn readers_share_a_file_and_change_nothing() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("blocks");
    assert!(read_bytes(&path, Some(4096)).is_err() && !path.exists(), "it is not made");
    std::fs::write(&path, [1; 2048]).unwrap();
    let error = read_bytes(&path, Some(4096)).unwrap_err();
    assert!(error.to_string().ends_with("2048 bytes, expected at least the requested size"));
    let readers = [read_bytes(&path, None).unwrap(), read_bytes(&path, Some(1024)).unwrap()];
    assert_eq!(readers.each_ref().map(StorageFile::len_bytes), [2048, 1024]);
    let error = open_file(&path, None, 512).unwrap_err();
    assert!(error.to_string().ends_with("not open elsewhere"), "{error}");
    drop(readers);
    let _writer = open_file(&path, None, 512).unwrap();
    let error = read_bytes(&path, None).unwrap_err();
    assert!(error.to_string().ends_with("not open for writing"), "{error}");
}

#[test]
fn holes_are_distinguished_from_data_to_the_end_of_the_file() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("blocks");
    let file = open_file(&path, Some(4 << 20), 4096).unwrap();
    let extent = |len_bytes, is_hole| FileExtent { len_bytes, is_hole };
    assert_eq!(file.extent_at(0), extent(4 << 20, true));
    std::fs::File::options()
        .write(true)
        .open(&path)
        .unwrap()
        .write_all_at(&[1; 1 << 20], 1 << 20)
        .unwrap();
    assert_eq!(file.extent_at(0), extent(1 << 20, true));
    assert_eq!(file.extent_at(4096), extent((1 << 20) - 4096, true));
    assert_eq!(file.extent_at(3 << 19), extent(1 << 19, false));
    assert_eq!(file.extent_at(2 << 20), extent(2 << 20, true));
    assert_eq!(file.extent_at(4 << 20), extent(0, false));
    drop(file);
    let part = open_file(&path, Some(3 << 20), 4096).unwrap();
    assert_eq!(part.extent_at(2 << 20), extent(1 << 20, true), "no further than what is used");
}

#[test]
fn page_cache_reason_is_reported() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("blocks");
    let (len_bytes, unit_bytes) = (Some(4096), 512);
    let options = FileOptions { path, len_bytes, unit_bytes, direct: false, read_only: false };
    assert_eq!(
        StorageFile::open(&options).unwrap().direct_io_alignment(),
        Err(BufferedReason::Requested)
    );
    // One byte is less than any device's alignment; without support for direct transfers that is
    // the reason.
    let tiny = FileOptions { unit_bytes: 1, direct: true, ..options };
    let reason = StorageFile::open(&tiny).unwrap().direct_io_alignment().unwrap_err();
    assert_ne!(reason, BufferedReason::Requested);
    assert!(reason.to_string().starts_with("through the page cache: "));
}

#[test]
fn memory_file_system_is_recognized() {
    let shared_memory = Path::new("/dev/shm");
    let Ok(file) = tempfile::NamedTempFile::new_in(shared_memory) else {
        return println!("skipped: no /dev/shm to write to");
    };
    let durability = open_file(file.path(), Some(4096), 512).unwrap().durability();
    assert_eq!(durability, tenmil_base::Durability::NonPersistent);
}

#[test]
fn lock_of_an_exiting_process_is_awaited_and_no_other() {
    let (looks, pauses) = (Cell::new(0), Cell::new(0));
    let wait = |free_after: u32, left_until: u32| {
        looks.set(0);
        pauses.set(0);
        let takes = || looks.get() > free_after;
        let is_left = || looks.replace(looks.get() + 1) < left_until;
        let pause = || pauses.set(pauses.get() + 1);
        (super::wait_for_stale_lock(takes, is_left, pause), pauses.get())
    };
    assert_eq!(wait(7, u32::MAX), (true, 7));
    assert_eq!(wait(0, 0), (true, 0), "it was given back after all");
    assert_eq!(wait(9, 4), (false, 4), "another process has the lock now");
    assert_eq!(wait(u32::MAX, u32::MAX), (false, super::LOCK_ATTEMPTS), "and not for ever");
}

#[test]
fn exited_lock_owner_is_recognized() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("blocks");
    let file = std::fs::File::create_new(&path).unwrap();
    file.set_len(4096).unwrap();
    let theirs = file.try_clone().unwrap();
    let locker = std::process::Command::new("flock").args(["-x", "0"]).stdin(theirs).spawn();
    let Ok(mut locker) = locker else {
        println!("skipped: there is no command `flock`");
        return;
    };
    let descriptor = std::os::fd::OwnedFd::from(file.try_clone().unwrap());
    // It has not been waited for, so its name is still known.
    while !super::has_ended(locker.id()) {
        std::thread::yield_now();
    }
    let said = super::describe_lock_owner(&descriptor);
    assert!(said.starts_with(&format!("process {} (flock) has ended", locker.id())), "{said}");
    assert!(locker.wait().unwrap().success());
    assert_eq!(super::lock_owners(&descriptor), [locker.id()], "it is still locked");
    assert!(super::has_ended(locker.id()));
    let said = super::describe_lock_owner(&descriptor);
    assert!(said.ends_with("has ended, and the kernel has not done its I/O yet"), "{said}");
    let opening = std::thread::spawn(move || open_file(&path, None, 512).is_ok());
    drop((descriptor, file));
    assert!(opening.join().unwrap(), "it carries on");
}
