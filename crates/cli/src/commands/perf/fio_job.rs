//! Job files of fio as arguments of `perf`, for `perf --fio-job`.
//!
//! ```text
//!   [global]                     name of the job, and the words of a command line:
//!   rw=randread   bs=4k    ──▶   "read"   -w randread -o 4k -q 32 -t 10 null:
//!   [read]
//!   filename=null\:  iodepth=32  runtime=10
//! ```

use tenmil_base::Error;

/// A job, with the words of the command line that does the same.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct FioJob {
    pub(super) name: String,
    pub(super) words: Vec<String>,
}

/// Options of a job, in the order of the file; a later one replaces an earlier one of the same name.
type Options = Vec<(String, String)>;

/// Options that change nothing here: how fio submits, reports and prepares files.
const WITHOUT_EFFECT: [&str; 17] = [
    "buffered",
    "direct",
    "disable_bw",
    "disable_clat",
    "disable_lat",
    "disable_slat",
    "group_reporting",
    "gtod_reduce",
    "invalidate",
    "ioengine",
    "name",
    "norandommap",
    "randrepeat",
    "refill_buffers",
    "stonewall",
    "thread",
    "time_based",
];

/// Reads the jobs of a file. They run one after the other.
pub(super) fn parse_jobs(text: &str) -> Result<Vec<FioJob>, Error> {
    let mut global = Options::new();
    let mut jobs: Vec<(String, Options)> = Vec::new();
    for (number, line) in (1..).zip(text.lines()) {
        let line = without_comment(line);
        if line.is_empty() {
            continue;
        }
        if let Some(name) = line.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')) {
            jobs.push((name.to_owned(), global.clone()));
            continue;
        }
        let (key, value) = line.split_once('=').unwrap_or((line, "1"));
        let option = (name_of_option(key.trim()).to_owned(), value.trim().to_owned());
        let Some((name, options)) = jobs.last_mut() else {
            let text =
                format!("line {number}: `{line}` is in no section, expected [global] or [NAME]");
            return Err(Error::usage(text));
        };
        let options = if name == "global" { &mut global } else { options };
        options.retain(|(known, _)| *known != option.0);
        options.push(option);
    }
    jobs.retain(|(name, _)| name != "global");
    if jobs.is_empty() {
        return Err(Error::usage("it has no job, expected a section [NAME]"));
    }
    let mut parsed = Vec::new();
    for (name, options) in jobs {
        let refuse = |why: Error| why.with_context(format!("job {name}"));
        let is_first = parsed.is_empty();
        if !is_first && !options.iter().any(|(key, value)| key == "stonewall" && value != "0") {
            return Err(refuse(Error::usage(
                "it runs beside the job before it, expected `stonewall`: jobs run one after the other",
            )));
        }
        let words = words_of(&options).map_err(refuse)?;
        parsed.push(FioJob { name, words });
    }
    Ok(parsed)
}

/// The line up to a comment, which begins at its start or after a space.
fn without_comment(line: &str) -> &str {
    let line = line.trim();
    let is_start = |at: usize| at == 0 || line[..at].ends_with(char::is_whitespace);
    let end = line.char_indices().find(|(at, one)| matches!(one, '#' | ';') && is_start(*at));
    line[..end.map_or(line.len(), |(at, _)| at)].trim_end()
}

/// The usual name of an option that has several.
fn name_of_option(key: &str) -> &str {
    match key {
        "blocksize" => "bs",
        "readwrite" => "rw",
        "wait_for_previous" => "stonewall",
        _ => key,
    }
}

/// Arguments of `perf` for the options of a job.
fn words_of(options: &Options) -> Result<Vec<String>, Error> {
    let find =
        |key: &str| options.iter().find(|(known, _)| known == key).map(|(_, value)| &**value);
    let mut words = Vec::new();
    let mut unknown = Vec::new();
    for (key, value) in options {
        match arguments_of(key, value)? {
            Some(found) => words.extend(found),
            None if ["filename", "offset", "size", "uri"].contains(&key.as_str()) => {}
            None => unknown.push(key.as_str()),
        }
    }
    if !unknown.is_empty() {
        let (names, s) = (unknown.join(", "), if unknown.len() == 1 { "" } else { "s" });
        return Err(Error::usage(format!("unknown option{s} {names}"))
            .with_hint("Remove what does not matter; docs/user/perf.md lists what is known."));
    }
    if find("runtime").is_none() && find("number_ios").is_none() {
        return Err(Error::usage("it has no end, expected `runtime` or `number_ios`"));
    }
    let files = match (find("uri"), find("filename")) {
        // As the engine of fio for tenmil has it: not split.
        (Some(uri), _) => vec![uri.to_owned()],
        (None, Some(names)) => split_files(names),
        (None, None) => {
            let text = "it has no `filename` and no `uri`, expected a path or a device URI";
            return Err(Error::usage(text));
        }
    };
    words.extend(files.iter().map(|file| device_of(file, find("size"), find("offset"))));
    Ok(words)
}

/// Arguments of `perf` for one option. None if it is not known, or has a part in the name of a device.
fn arguments_of(key: &str, value: &str) -> Result<Option<Vec<String>>, Error> {
    let refuse =
        |expected: &str| Err(Error::usage(format!("{key} is `{value}`, expected {expected}")));
    let pair = |flag: &str, value: &str| Ok(Some(vec![flag.to_owned(), value.to_owned()]));
    match key {
        _ if WITHOUT_EFFECT.contains(&key) => Ok(Some(Vec::new())),
        "rw" => match value {
            "read" | "write" | "randread" | "randwrite" | "rw" | "randrw" => pair("-w", value),
            "readwrite" => pair("-w", "rw"),
            "randtrim" => pair("-w", "trim"),
            _ => refuse("read, write, randread, randwrite, rw, randrw or randtrim"),
        },
        "bs" if value.contains([',', '-']) => refuse("one size"),
        "bs" => pair("-o", value),
        "bssplit" if value.contains(',') => refuse("one mix for all operations"),
        "bssplit" => pair("--bssplit", &value.replace(':', ",").replace('/', ":")),
        "iodepth" => pair("-q", value),
        "runtime" => pair("-t", value),
        "ramp_time" => pair("-a", value),
        "number_ios" => pair("-d", value),
        "rwmixread" => pair("-M", value),
        "rwmixwrite" => match value.parse::<u8>() {
            Ok(writes @ 0..=100) => pair("-M", &(100 - writes).to_string()),
            _ => refuse("0 to 100"),
        },
        "cpus_allowed" => pair("-c", value),
        "numjobs" if value == "1" => Ok(Some(Vec::new())),
        "numjobs" => refuse("1; for several threads: cpus_allowed, with a processor for each"),
        "randseed" => pair("--seed", value),
        "rate_iops" => pair("--rate", value),
        "rate_process" => match value {
            "poisson" => pair("--arrivals", "poisson"),
            "linear" => pair("--arrivals", "uniform"),
            _ => refuse("linear or poisson"),
        },
        "random_distribution" => match value.split_once(':') {
            Some(("zipf", theta)) => pair("--zipf", theta),
            None if value == "random" => Ok(Some(Vec::new())),
            _ => refuse("random or zipf:THETA"),
        },
        "verify" if value == "0" => Ok(Some(Vec::new())),
        "verify" => Ok(Some(vec!["--verify".to_owned()])),
        _ => Ok(None),
    }
}

/// Names of files, which are separated by colons; a colon in a name is written `\:`.
fn split_files(text: &str) -> Vec<String> {
    let mut names = vec![String::new()];
    let mut characters = text.chars().peekable();
    while let Some(one) = characters.next() {
        match one {
            '\\' if characters.peek() == Some(&':') => {
                characters.next();
                names.iter_mut().last().into_iter().for_each(|name| name.push(':'));
            }
            ':' => names.push(String::new()),
            _ => names.iter_mut().last().into_iter().for_each(|name| name.push(one)),
        }
    }
    names
}

/// URI of a file, or the part of it that the job uses. A file that does not exist is made as long as the job is.
fn device_of(file: &str, size: Option<&str>, offset: Option<&str>) -> String {
    let size = size.filter(|size| *size != "100%");
    match (size, offset) {
        (None, None) => file.to_owned(),
        (Some(size), None) if !file.contains(':') && !file.starts_with("/dev/") => {
            format!("file:{file}?size={size}")
        }
        (size, offset) => {
            let size = size.map(|size| format!("&size={size}")).unwrap_or_default();
            format!("split:[{file}]?offset={}{size}", offset.unwrap_or("0"))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{parse_jobs, split_files};

    fn words(text: &str) -> Vec<String> {
        let jobs = parse_jobs(text).unwrap();
        jobs.iter().map(|job| format!("{}: {}", job.name, job.words.join(" "))).collect()
    }

    fn error(text: &str) -> String {
        parse_jobs(text).unwrap_err().text
    }

    #[test]
    fn jobs_become_command_lines() {
        let text = "; a comment\n[global]\nioengine=libaio\ndirect=1\nbs=4k\nruntime=10 # seconds\n\
                    time_based\nfilename=null\\:\n\n[random]\nrw=randread\niodepth=32\n\n\
                    [mixed]\nstonewall\nrw=randrw\nrwmixwrite=30\nbssplit=4k/70:64k/30\nverify=crc32c\n\
                    random_distribution=zipf:0.9\nrate_iops=5000\nrate_process=poisson\n\
                    uri=fault:[ram:64m]?rule=error:read@1-2;hang:write\n";
        assert_eq!(
            words(text),
            [
                "random: -o 4k -t 10 -w randread -q 32 null:",
                "mixed: -o 4k -t 10 -w randrw -M 70 --bssplit 4k:70,64k:30 --verify --zipf 0.9 \
                 --rate 5000 --arrivals poisson fault:[ram:64m]?rule=error:read@1-2;hang:write",
            ]
        );
    }

    #[test]
    fn later_options_replace_those_of_the_global_section() {
        let text = "[global]\nbs=4k\nruntime=5\n[a]\nblocksize=8k\nfilename=x\n";
        assert_eq!(words(text), ["a: -t 5 -o 8k x"]);
    }

    #[test]
    fn size_and_offset_are_parts_of_the_device() {
        let device = |options: &str| {
            let found = words(&format!("[a]\nruntime=1\n{options}\n"));
            found[0].rsplit(' ').next().unwrap_or_default().to_owned()
        };
        assert_eq!(device("filename=/tmp/disk\nsize=64m"), "file:/tmp/disk?size=64m");
        assert_eq!(device("filename=/tmp/disk\nsize=100%"), "/tmp/disk");
        assert_eq!(device("filename=ram\\:1g\nsize=64m"), "split:[ram:1g]?offset=0&size=64m");
        assert_eq!(device("filename=/dev/sdb\noffset=1g"), "split:[/dev/sdb]?offset=1g");
        assert_eq!(split_files("/dev/sdb:/dev/sdc:a\\:b"), ["/dev/sdb", "/dev/sdc", "a:b"]);
    }

    #[test]
    fn what_is_not_known_is_named() {
        let job = "[a]\nfilename=x\nruntime=1\n";
        assert_eq!(
            error(&format!("{job}thinktime=5\nfsync=1\n")),
            "job a: unknown options thinktime, fsync"
        );
        assert_eq!(
            error(&format!("{job}numjobs=4\n")).split(", ").next(),
            Some("job a: numjobs is `4`")
        );
        assert!(
            error(&format!("{job}rw=trimwrite\n"))
                .starts_with("job a: rw is `trimwrite`, expected")
        );
        assert!(
            error(&format!("{job}[b]\nfilename=x\nruntime=1\n")).contains("expected `stonewall`")
        );
        assert!(error("[a]\nruntime=1\n").contains("no `filename`"));
        assert!(error("[a]\nfilename=x\n").contains("no end"));
        assert!(error("bs=4k\n").starts_with("line 1: `bs=4k` is in no section"));
        assert!(error("[global]\nbs=4k\n").contains("no job"));
    }
}
