//! Growing a pool in a process that makes files at once, as a server does.

#![expect(clippy::disallowed_methods, reason = "it makes the files and lists them")]

use super::PoolFixture;

#[test]
fn rejected_grow_creates_and_grows_no_file() {
    let bench = PoolFixture::new("16m");
    std::fs::write(bench.path("short"), [0; 4096]).unwrap();
    let names = || {
        let mut found: Vec<_> = std::fs::read_dir(bench.path(".")).unwrap().flatten().collect();
        found.sort_by_key(|entry| entry.file_name());
        let len = |entry: &std::fs::DirEntry| (entry.file_name(), entry.metadata().unwrap().len());
        found.iter().map(len).collect::<Vec<_>>()
    };
    let before = names();
    let open = bench.open_pool();
    let devices = open.devices();
    for (added, expected) in [
        (vec![bench.new_file_uri("new", "64k")], "expected"),
        (vec![bench.new_file_uri("short", "64k")], "expected"),
        (
            vec![bench.new_file_uri("new", "16m"), bench.file_uri("none")],
            "with a size it would be made",
        ),
        (vec![bench.new_file_uri("short", "16m"), bench.new_file_uri("new", "64k")], "expected"),
        (vec![bench.new_file_uri("new", "16m"), bench.new_file_uri("new", "16m")], ""),
    ] {
        let refused = open.grow_pool(&bench.opener(), &added, false).unwrap_err().to_string();
        assert!(refused.contains(expected), "{refused}");
        assert_eq!(names(), before, "{added:?}: {refused}");
        assert_eq!(open.devices(), devices);
    }
    open.grow_pool(&bench.opener(), &[bench.new_file_uri("new", "16m")], false).unwrap();
    assert_eq!(names().len(), before.len() + 1);
    assert_eq!(open.devices().len(), 2);
}
