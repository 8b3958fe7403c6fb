//! Replacing a text file durably, if it still is what the caller has read.
//!
//! ```text
//!   draft beside it ─ owner, mode ─ text ─ fsync ─ compare ─ rename ─ fsync of the directory
//!                                                     │        └ from here on the new text is there
//!                                                     └ the file changed since: nothing is replaced
//! ```
//!
//! A crash between any two of these leaves the former or the new text whole, and at most a draft
//! (PATH.new), which the next replacement removes.

use std::fmt;
use std::fs::File;
use std::io::{self, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt, fchown};
use std::path::{Path, PathBuf};

/// Why a file was not replaced.
#[derive(Debug)]
pub enum ReplaceError {
    /// Its text is no longer the one that the caller has read.
    Changed,
    /// A file could not be written; PATH has its former text.
    NotReplaced(PathBuf, io::Error),
    /// PATH has the new text, but the kernel could not confirm that it survives a loss of power.
    NotDurable(PathBuf, io::Error),
}

/// Step of a replacement, for tests that stop before each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ReplaceStep {
    RemoveStaleDraft,
    CreateDraft,
    SetOwner,
    SetMode,
    WriteFirstHalf,
    WriteSecondHalf,
    SyncDraft,
    Compare,
    Rename,
    SyncDirectory,
    Return,
}

/// Replaces the text of the file at `path`, which is `former` now, and keeps owner and mode. A link is
/// followed. Blocks until the new text is durable.
///
/// # Errors
///
/// [`ReplaceError`] says whether the file has its former text or the new one.
pub fn replace_text(path: &Path, former: &str, text: &str) -> Result<(), ReplaceError> {
    let path = path
        .canonicalize()
        .map_err(|error| ReplaceError::NotReplaced(path.to_path_buf(), error))?;
    let replaced = replace_in_steps(&path, former, text, &mut |_| Ok(()));
    if matches!(replaced, Err(ReplaceError::Changed | ReplaceError::NotReplaced(..))) {
        let _ = std::fs::remove_file(draft_path(&path));
    }
    replaced
}

/// Writes a new text file durably.
///
/// # Errors
///
/// If there is a file at `path`, or it cannot be written.
pub fn create_text(path: &Path, text: &str) -> io::Result<()> {
    let mut file = File::create_new(path)?;
    file.write_all(text.as_bytes())?;
    file.sync_all()?;
    directory_of(path)?.sync_all()
}

/// The replacement without removal of the draft after an error. `before` is called before each step; its
/// error ends the replacement there, as a crash would.
fn replace_in_steps(
    path: &Path,
    former: &str,
    text: &str,
    before: &mut dyn FnMut(ReplaceStep) -> io::Result<()>,
) -> Result<(), ReplaceError> {
    let draft = draft_path(path);
    let not_replaced = |of: &Path| {
        let of = of.to_path_buf();
        move |error| ReplaceError::NotReplaced(of, error)
    };
    let mut write_draft = || {
        before(ReplaceStep::RemoveStaleDraft)?;
        match std::fs::remove_file(&draft) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        before(ReplaceStep::CreateDraft)?;
        let mut file = File::options().write(true).create_new(true).mode(0o600).open(&draft)?;
        let (meta, own) = (std::fs::metadata(path)?, file.metadata()?);
        before(ReplaceStep::SetOwner)?;
        if (meta.uid(), meta.gid()) != (own.uid(), own.gid()) {
            fchown(&file, Some(meta.uid()), Some(meta.gid()))?;
        }
        before(ReplaceStep::SetMode)?;
        file.set_permissions(PermissionsExt::from_mode(meta.mode() & 0o7777))?;
        let (first, second) = text.as_bytes().split_at(text.len() / 2);
        before(ReplaceStep::WriteFirstHalf)?;
        file.write_all(first)?;
        before(ReplaceStep::WriteSecondHalf)?;
        file.write_all(second)?;
        before(ReplaceStep::SyncDraft)?;
        file.sync_all()
    };
    write_draft().map_err(not_replaced(&draft))?;
    // Just before the rename, so that a text that an editor has saved meanwhile is not lost.
    before(ReplaceStep::Compare).map_err(not_replaced(path))?;
    if std::fs::read(path).map_err(not_replaced(path))? != former.as_bytes() {
        return Err(ReplaceError::Changed);
    }
    before(ReplaceStep::Rename).map_err(not_replaced(path))?;
    std::fs::rename(&draft, path).map_err(not_replaced(path))?;
    let not_durable = |error| ReplaceError::NotDurable(path.to_path_buf(), error);
    before(ReplaceStep::SyncDirectory).map_err(not_durable)?;
    directory_of(path).and_then(|directory| directory.sync_all()).map_err(not_durable)?;
    before(ReplaceStep::Return).map_err(not_durable)
}

fn draft_path(path: &Path) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(".new");
    name.into()
}

fn directory_of(path: &Path) -> io::Result<File> {
    let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty());
    File::open(parent.unwrap_or(Path::new(".")))
}

impl fmt::Display for ReplaceError {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Changed => out.write_str("it has been changed since it was read"),
            Self::NotReplaced(path, error) => write!(out, "write {}: {error}", path.display()),
            Self::NotDurable(path, error) => write!(
                out,
                "{} is written, but may be lost with the power: {error}",
                path.display()
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io;
    use std::os::unix::fs::PermissionsExt;
    use std::path::PathBuf;

    use super::{ReplaceError, ReplaceStep, draft_path, replace_in_steps, replace_text};

    fn file_with(text: &str) -> (tempfile::TempDir, PathBuf) {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("target.toml");
        std::fs::write(&path, text).unwrap();
        (directory, path)
    }

    #[test]
    fn stop_before_any_step_leaves_the_former_or_the_new_text() {
        let (mut last, mut steps) = (None, 0);
        for stop_at in 0.. {
            let (_directory, path) = file_with("former");
            let mut count = 0;
            let mut reached = None;
            let stopped = replace_in_steps(&path, "former", "the new text", &mut |step| {
                reached = Some(step);
                count += 1;
                if count > stop_at { Err(io::Error::other("stopped")) } else { Ok(()) }
            });
            let found = std::fs::read_to_string(&path).unwrap();
            let is_new = matches!(
                (&stopped, reached.unwrap()),
                (Ok(()), _) | (_, ReplaceStep::SyncDirectory | ReplaceStep::Return)
            );
            assert_eq!(found, if is_new { "the new text" } else { "former" }, "{reached:?}");
            // What a crash has left behind does not hinder the next replacement.
            replace_text(&path, &found, "the next one").unwrap();
            assert_eq!(std::fs::read_to_string(&path).unwrap(), "the next one");
            assert!(!draft_path(&path).exists());
            steps = stop_at;
            last = reached;
            if stopped.is_ok() {
                break;
            }
        }
        assert_eq!((last, steps), (Some(ReplaceStep::Return), 11));
    }

    #[test]
    fn file_that_was_changed_meanwhile_is_not_replaced() {
        let (_directory, path) = file_with("another");
        assert!(matches!(replace_text(&path, "former", "new"), Err(ReplaceError::Changed)));
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "another");
        assert!(!draft_path(&path).exists());
    }

    #[test]
    fn mode_is_kept_and_a_link_is_followed() {
        let (directory, path) = file_with("former");
        std::fs::set_permissions(&path, PermissionsExt::from_mode(0o640)).unwrap();
        let link = directory.path().join("link.toml");
        std::os::unix::fs::symlink("target.toml", &link).unwrap();
        replace_text(&link, "former", "new").unwrap();
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "new");
        assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o7777, 0o640);
        assert!(std::fs::symlink_metadata(&link).unwrap().is_symlink());
    }
}
