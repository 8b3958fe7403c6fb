//! Text of errors of the operating system.

use std::io;

/// Text of an I/O error on a path, without the error number for common causes.
pub(crate) fn reason(error: &io::Error) -> String {
    match error.kind() {
        io::ErrorKind::NotFound => "no such file or directory".into(),
        io::ErrorKind::PermissionDenied => "permission denied".into(),
        io::ErrorKind::IsADirectory => "is a directory".into(),
        io::ErrorKind::ReadOnlyFilesystem => "the filesystem is read-only".into(),
        _ => error.to_string(),
    }
}
