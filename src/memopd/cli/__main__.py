from memopd.cli import main

main()
