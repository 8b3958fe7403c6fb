//! Files of a command that may be refused: a process of its own, since all files of a process are treated
//! alike.

#![allow(clippy::disallowed_methods, reason = "it looks at the files that are made")]
#![expect(clippy::unwrap_used, reason = "a test may")]

use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::path::Path;

use tenmil_linux::storage_file::{
    CreationPolicy, FileError, FileOptions, StorageFile, commit_created, create_files_if_ok,
    path_or_proc_link, set_creation_policy, undo_created,
};

fn open_file(path: &Path, len_bytes: u64) -> Result<StorageFile, FileError> {
    let (path, len_bytes, unit_bytes) = (path.into(), Some(len_bytes), 512);
    StorageFile::open(&FileOptions { path, len_bytes, unit_bytes, direct: false, read_only: false })
}

#[test]
fn files_are_created_and_grown_on_commit() {
    let directory = tempfile::tempdir().unwrap();
    let [new, short, taken] = ["new", "short", "taken"].map(|name| directory.path().join(name));
    std::fs::write(&short, [7; 1000]).unwrap();
    let on_disk = || std::fs::metadata(&short).unwrap().len();
    set_creation_policy(CreationPolicy::Recorded);
    let file = open_file(&new, 8192).unwrap();
    if new.exists() {
        println!("skipped: no files without a name here, or no /proc");
        return;
    }
    assert!(path_or_proc_link(&new).metadata().is_ok_and(|found| found.len() == 8192));
    let error = open_file(&new, 8192).unwrap_err().to_string();
    assert!(error.contains("this process has it open already"), "{error}");
    drop(file);
    let grown = open_file(&short, 8192).unwrap();
    assert_eq!((grown.len_bytes(), grown.refresh_len().unwrap(), on_disk()), (8192, 8192, 1000));
    assert!(grown.is_growth_pending());
    let mut bytes = [1; 1024];
    grown.read_with_zero_fill(512, &mut bytes).unwrap();
    assert!(bytes[..488] == [7; 488] && bytes[488..] == [0; 536]);
    grown.read_with_zero_fill(4096, &mut bytes).unwrap();
    assert_eq!(bytes, [0; 1024]);
    drop(grown);
    // Refused.
    undo_created();
    assert!(!new.exists() && on_disk() == 1000);
    assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 1);

    // What was written before it had a name is there, however often it was opened.
    let file = open_file(&new, 8192).unwrap();
    let bytes = std::fs::File::from(file.as_fd().try_clone_to_owned().unwrap());
    bytes.write_all_at(&[9; 512], 512).unwrap();
    drop((file, bytes));
    let file = open_file(&new, 16_384).unwrap();
    let _grown = open_file(&short, 8192).unwrap();
    let other = open_file(&taken, 8192).unwrap();
    std::fs::write(&taken, "another process's").unwrap();
    let error = commit_created().unwrap_err().to_string();
    assert!(error.contains("taken: ") && error.contains("nothing has been made since"), "{error}");
    assert_eq!(std::fs::read(&taken).unwrap(), b"another process's");
    assert_eq!((file.len_bytes(), on_disk()), (16_384, 8192));
    let found = std::fs::read(&new).unwrap();
    assert!(found.len() == 16_384 && found[512..1024] == [9; 512]);
    drop((file, other));
    drop(open_file(&directory.path().join("at once"), 512).unwrap());
    assert!(directory.path().join("at once").exists(), "nothing is put off any more");
    create_and_grow_by_changes(directory.path());
}

/// A process that has begun, and changes what it has open.
fn create_and_grow_by_changes(directory: &Path) {
    let [new, short, other] =
        ["by change", "short by change", "of another thread"].map(|name| directory.join(name));
    std::fs::write(&short, [7; 1000]).unwrap();
    let on_disk = || std::fs::metadata(&short).unwrap().len();
    // Refused: by what is wrong, or by what comes to be there meanwhile.
    for wrong in [Some(directory.join("no/such")), None] {
        let refused = create_files_if_ok(|| {
            let files = (open_file(&short, 8192)?, open_file(&new, 8192)?);
            assert!(!new.exists() && on_disk() == 1000);
            assert!(path_or_proc_link(&new).metadata().is_ok_and(|found| found.len() == 8192));
            let one = other.clone();
            std::thread::spawn(move || drop(open_file(&one, 512).unwrap())).join().unwrap();
            assert!(other.exists(), "another thread makes its files at once");
            match &wrong {
                Some(wrong) => drop(open_file(wrong, 512)?),
                None => std::fs::write(&new, "another process's").unwrap(),
            }
            Ok::<_, FileError>(files)
        });
        refused.unwrap_err();
        assert_eq!((new.exists(), on_disk()), (wrong.is_none(), 1000));
        assert!(other.exists());
    }
    std::fs::remove_file(&new).unwrap();
    let files = create_files_if_ok(|| {
        Ok::<_, FileError>((open_file(&new, 8192)?, open_file(&short, 8192)?))
    })
    .unwrap();
    assert_eq!((new.metadata().unwrap().len(), on_disk()), (8192, 8192));
    drop(files);
    drop(open_file(&directory.join("at once again"), 512).unwrap());
    assert!(directory.join("at once again").exists());
}
