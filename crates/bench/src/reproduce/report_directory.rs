//! Report directory: saved data of finished experiments, which the next run reuses. Each file has a
//! key that identifies program, machine and effort.

use std::path::{Path, PathBuf};

use crate::experiment::{Effort, ExperimentRecord};
use serde::{Deserialize, Serialize};
use tenmil_linux::MachineEnvironment;

use tenmil_base::Error;
use tenmil_linux::storage_file::error_text;

/// Directory of reports and their raw data.
#[derive(Debug)]
pub struct ReportDirectory {
    directory: PathBuf,
    key: String,
}

/// File in the report directory.
#[derive(Serialize, Deserialize)]
struct SavedRecord {
    key: String,
    record: ExperimentRecord,
}

/// Subdirectory of finished experiments.
const SUBDIRECTORY: &str = "finished";

#[expect(clippy::disallowed_methods, reason = "the face, where files are real")]
impl ReportDirectory {
    /// Opens the directory and creates it if necessary. Only files with this `key` are used.
    pub fn open(directory: &Path, key: String) -> Result<Self, Error> {
        let directory_path = directory.join(SUBDIRECTORY);
        std::fs::create_dir_all(&directory_path).map_err(|error| {
            Error::usage(format!(
                "--out {}: {}, expected a directory that can be written",
                directory.display(),
                error_text(&error)
            ))
        })?;
        Ok(Self { directory: directory.to_owned(), key })
    }

    /// Saved data of an experiment, measured by the same program on the same machine with the same
    /// effort.
    pub fn load_record(&self, name: &str) -> Option<ExperimentRecord> {
        let text = std::fs::read(self.path_of(name)).ok()?;
        let saved: SavedRecord = serde_json::from_slice(&text).ok()?;
        (saved.key == self.key && saved.record.name == name).then_some(saved.record)
    }

    /// Saves the data of an experiment. If that fails, the experiment is measured again next time.
    pub fn save_record(&self, record: &ExperimentRecord) {
        let saved = SavedRecord { key: self.key.clone(), record: record.clone() };
        let Ok(text) = serde_json::to_vec_pretty(&saved) else { return };
        // Written to a new file and renamed, so that a reader never finds a partial record.
        let path = self.path_of(&record.name);
        let new = path.with_extension("new");
        let written = std::fs::write(&new, text).and_then(|()| std::fs::rename(&new, &path));
        if let Err(error) = written {
            tracing::info!("{} is not saved: {}", record.name, error_text(&error));
        }
    }

    /// Writes a report and returns its path.
    pub fn write_report(&self, name: &str, text: &str) -> Result<String, Error> {
        let path = self.directory.join(name);
        let shown = path.display().to_string();
        std::fs::write(&path, text).map_err(|error| {
            Error::environment(format!("write {shown}: {}", error_text(&error)))
        })?;
        Ok(shown)
    }

    fn path_of(&self, name: &str) -> PathBuf {
        self.directory.join(SUBDIRECTORY).join(format!("{name}.json"))
    }
}

/// Key of program, machine and effort. Data saved under another key are ignored.
#[expect(clippy::disallowed_methods, reason = "the face, where files are real")]
pub fn record_key(machine: &MachineEnvironment, effort: &Effort, builds: Option<&Path>) -> String {
    let program = std::env::current_exe().and_then(std::fs::read);
    let program = program.map_or(0, |bytes| fnv1a_hash(&bytes));
    let processor = machine.cpu_model.as_deref().unwrap_or("unknown");
    let builds =
        builds.map_or_else(String::new, |path| format!(", builds {:016x}", hash_of_builds(path)));
    format!(
        "program {program:016x}, {processor}, cores {}, Linux {}, {effort:?}{builds}",
        machine.allowed, machine.kernel
    )
}

/// Hash of all programs with other build options.
#[expect(clippy::disallowed_methods, reason = "the face, where files are real")]
fn hash_of_builds(directory: &Path) -> u64 {
    let ways = std::fs::read_dir(directory).into_iter().flatten().flatten();
    let mut programs: Vec<PathBuf> = ways.map(|variant| variant.path().join("tenmil")).collect();
    programs.sort_unstable();
    let hashes = programs.iter().filter_map(|path| Some(fnv1a_hash(&std::fs::read(path).ok()?)));
    fnv1a_hash(&hashes.flat_map(u64::to_be_bytes).collect::<Vec<u8>>())
}

/// FNV-1a hash over 8-byte words, since the program is large. Not resistant to forgery.
fn fnv1a_hash(bytes: &[u8]) -> u64 {
    let word = |chunk: &[u8]| chunk.iter().fold(0_u64, |word, byte| word << 8 | u64::from(*byte));
    let start = 0xcbf2_9ce4_8422_2325;
    bytes.chunks(8).fold(start, |hash, chunk| (hash ^ word(chunk)).wrapping_mul(0x0100_0000_01b3))
}

#[cfg(test)]
mod tests {
    use crate::experiment::{Effort, ExperimentRecord};

    use super::{ReportDirectory, fnv1a_hash, record_key};
    use crate::perf::report::sample_result::quiet_machine;

    fn test_record(name: &str) -> ExperimentRecord {
        ExperimentRecord { name: name.into(), ..ExperimentRecord::default() }
    }

    #[test]
    fn saved_record_is_found_by_the_same_key_only() {
        let root = tempfile::tempdir().unwrap();
        let store = ReportDirectory::open(root.path(), "one".into()).unwrap();
        assert_eq!(store.load_record("a"), None);
        store.save_record(&test_record("a"));
        assert_eq!(store.load_record("a"), Some(test_record("a")));
        assert_eq!(store.load_record("b"), None);
        let other = ReportDirectory::open(root.path(), "other".into()).unwrap();
        assert_eq!(other.load_record("a"), None, "another program, machine or pace");
        other.save_record(&test_record("a"));
        assert_eq!(
            (other.load_record("a"), store.load_record("a")),
            (Some(test_record("a")), None)
        );
    }

    #[test]
    #[expect(clippy::disallowed_methods, reason = "a test may")]
    fn incomplete_record_is_measured_again() {
        let root = tempfile::tempdir().unwrap();
        let store = ReportDirectory::open(root.path(), "one".into()).unwrap();
        store.save_record(&test_record("a"));
        let path = root.path().join("finished/a.json");
        let whole = std::fs::read(&path).unwrap();
        std::fs::write(&path, &whole[..whole.len() / 2]).unwrap();
        assert_eq!(store.load_record("a"), None);
        // A renamed file does not belong to another experiment.
        std::fs::write(root.path().join("finished/b.json"), whole).unwrap();
        assert_eq!(store.load_record("b"), None);
    }

    #[test]
    fn unusable_report_directory_is_rejected_by_name() {
        let refused = ReportDirectory::open("/proc/nowhere".as_ref(), String::new()).unwrap_err();
        assert!(refused.text.starts_with("--out /proc/nowhere: "), "{}", refused.text);
    }

    #[test]
    fn other_machine_or_effort_has_another_key() {
        let machine = quiet_machine().machine;
        let mut other = machine.clone();
        other.kernel = "7.0".into();
        let quick = record_key(&machine, &Effort::QUICK, None);
        assert_eq!(quick, record_key(&machine, &Effort::QUICK, None));
        assert_ne!(quick, record_key(&machine, &Effort::FULL, None));
        assert_ne!(quick, record_key(&other, &Effort::QUICK, None));
        assert_ne!(quick, record_key(&machine, &Effort::QUICK, Some("target/pgo".as_ref())));
        assert_ne!(fnv1a_hash(b"one program, built"), fnv1a_hash(b"one program, Built"));
    }
}
