//! Report file that is opened before the run and written after it.

use std::fs::{File, OpenOptions};
use std::io::{self, Seek, Write};
use std::path::PathBuf;

use tenmil_base::Error;
use tenmil_linux::storage_file::error_text;

/// Report file, known to be writable. A file that this run created is removed if no report is written.
#[derive(Debug)]
pub(super) struct ReportFile {
    path: PathBuf,
    file: File,
    is_new: bool,
}

impl ReportFile {
    /// Opens or creates the file; the error names the option.
    pub(super) fn open(flag: &str, path: &str) -> Result<Self, Error> {
        let open = |is_new| OpenOptions::new().write(true).create_new(is_new).open(path);
        let (opened, is_new) = match open(true) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => (open(false), false),
            opened => (opened, true),
        };
        match opened {
            Ok(file) => Ok(Self { path: path.into(), file, is_new }),
            Err(error) => Err(Error::usage(format!(
                "{flag} {path}: {}, expected a file that can be written",
                error_text(&error)
            ))),
        }
    }

    /// Replaces the content of the file and returns its path.
    pub(super) fn write_report(mut self, text: &str) -> Result<String, Error> {
        let path = self.path.display().to_string();
        let result = self.replace_content(text);
        result.map_err(|error| Error::environment(format!("write {path}: {error}")))?;
        self.is_new = false;
        Ok(path)
    }

    /// Truncates regular files only: a pipe, a terminal or another device cannot be truncated.
    fn replace_content(&mut self, text: &str) -> io::Result<()> {
        if self.file.metadata()?.is_file() {
            self.file.set_len(0)?;
            self.file.rewind()?;
        }
        self.file.write_all(text.as_bytes())
    }
}

impl Drop for ReportFile {
    fn drop(&mut self) {
        if self.is_new {
            // The error that led here is the one that is reported, so a failed removal is not.
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::ReportFile;

    fn test_path(name: &str) -> String {
        let name = format!("tenmil-report-{}-{name}", std::process::id());
        std::env::temp_dir().join(name).display().to_string()
    }

    #[test]
    fn unwritten_report_leaves_no_file() {
        let path = test_path("broken");
        drop(ReportFile::open("--html", &path).unwrap());
        assert!(!std::fs::exists(&path).unwrap());
    }

    #[test]
    fn older_report_stays_until_replaced() {
        let path = test_path("kept");
        let report = ReportFile::open("--html", &path).unwrap();
        report.write_report("a long first report").unwrap();
        drop(ReportFile::open("--html", &path).unwrap());
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "a long first report");
        ReportFile::open("--html", &path).unwrap().write_report("short").unwrap();
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "short");
        std::fs::remove_file(&path).unwrap();
    }

    #[test]
    fn report_is_written_to_pipes_and_devices_too() {
        let null = ReportFile::open("--html", "/dev/null").unwrap();
        assert_eq!(null.write_report("nothing is kept").unwrap(), "/dev/null");
        let full = ReportFile::open("--html", "/dev/full").unwrap();
        let refused = full.write_report("there is no room").unwrap_err();
        assert!(refused.text.starts_with("write /dev/full: "), "{}", refused.text);
        assert!(std::fs::exists("/dev/full").unwrap());
    }

    #[test]
    fn unwritable_report_file_is_rejected_by_name() {
        let refusal = |path| ReportFile::open("--html", path).unwrap_err().text;
        let expected = "expected a file that can be written";
        assert_eq!(
            refusal("/nowhere/at/all.html"),
            format!("--html /nowhere/at/all.html: no such file or directory, {expected}")
        );
        assert_eq!(refusal("/"), format!("--html /: is a directory, {expected}"));
    }
}
