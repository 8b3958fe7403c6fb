//! Replacing a text file and keeping its former version.

use std::io::{self, Write};
use std::path::{Path, PathBuf};

/// Replaces the text of a file, and keeps the former one beside it, as PATH.bak. After a crash either
/// text is there whole.
///
/// # Errors
///
/// If PATH.bak exists, or a file cannot be written.
pub fn replace_with_backup(path: &Path, text: &[u8]) -> io::Result<()> {
    let beside = |ending: &str| {
        let mut name = path.as_os_str().to_owned();
        name.push(ending);
        PathBuf::from(name)
    };
    let (backup, draft) = (beside(".bak"), beside(".new"));
    let named = |path: &Path, error: io::Error| {
        io::Error::new(error.kind(), format!("{}: {error}", path.display()))
    };
    // A hard link: PATH names a whole file at every moment.
    std::fs::hard_link(path, &backup).map_err(|error| named(&backup, error))?;
    let write = || {
        let mut file = std::fs::File::create_new(&draft)?;
        file.set_permissions(std::fs::metadata(path)?.permissions())?;
        file.write_all(text)?;
        file.sync_all()
    };
    write().map_err(|error| named(&draft, error))?;
    std::fs::rename(&draft, path).map_err(|error| named(path, error))
}

#[cfg(test)]
mod tests {
    use super::replace_with_backup;

    #[test]
    fn backup_keeps_the_former_text_and_is_never_overwritten() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("target.toml");
        let backup = directory.path().join("target.toml.bak");
        std::fs::write(&path, "old").unwrap();
        replace_with_backup(&path, b"new").unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), b"new");
        assert_eq!(std::fs::read(&backup).unwrap(), b"old");
        let error = replace_with_backup(&path, b"newer").unwrap_err();
        assert!(error.to_string().contains("target.toml.bak"), "{error}");
        assert_eq!(std::fs::read(&path).unwrap(), b"new");
        assert_eq!(std::fs::read(&backup).unwrap(), b"old");
    }
}
